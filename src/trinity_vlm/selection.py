"""Best-candidate selection (Section 2): the hardest question that passed the gate becomes supervision.

    argmax_g R_diff^(g)   subject to   R_fmt^(g) = R_fact-q^(g) = R_corr-a^(g) = 1,   ties at random

Degenerate case: no candidate passes, nothing is selected, and the image yields Questioner rollouts only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from trinity_vlm.types import Candidate


def select_candidate(candidates: Sequence[Candidate], seed: int) -> int | None:
    """Position of the selected candidate in ``candidates``, or None when none passed the gate.

    ``seed`` belongs to the episode and is used only to break ties, each tied candidate being equally likely.
    """
    difficulty = {
        position: candidate.screening.difficulty
        for position, candidate in enumerate(candidates)
        if candidate.format_valid and candidate.screening is not None and candidate.screening.passed
    }
    if not difficulty:
        return None
    hardest = max(difficulty.values())
    return random.Random(seed).choice([position for position, value in difficulty.items() if value == hardest])
