"""Trinity: one vision-language model asks, solves and verifies, and improves itself from unlabeled images.

Open :mod:`trinity_vlm.loop` first: its ``evolve`` reads like the paper's Figure 1.
"""

__version__ = "0.1.0"
