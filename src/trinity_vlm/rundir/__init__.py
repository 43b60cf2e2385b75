"""The run directory on disk: what a run leaves behind, and how it is read again. Free of torch.

Saving and loading tensors is in :mod:`trinity_vlm.checkpoint`, drawing in :mod:`trinity_vlm.rundir.figure`.
"""

from trinity_vlm.rundir.checkpoints import best_checkpoint, latest_checkpoint, mark_best
from trinity_vlm.rundir.config_changes import CHANGEABLE, check_resumable, config_hash
from trinity_vlm.rundir.directory import RunDirectory
from trinity_vlm.rundir.episode_table import EPISODE_SCHEMA
from trinity_vlm.rundir.evaluations import Evaluation
from trinity_vlm.rundir.pairs import export_pairs
from trinity_vlm.rundir.tables import write_episode_file

__all__ = [
    "CHANGEABLE",
    "EPISODE_SCHEMA",
    "Evaluation",
    "RunDirectory",
    "best_checkpoint",
    "check_resumable",
    "config_hash",
    "export_pairs",
    "latest_checkpoint",
    "mark_best",
    "write_episode_file",
]
