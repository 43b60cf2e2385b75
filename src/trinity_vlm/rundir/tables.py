"""Parquet files of a run directory: written whole or not at all, read with an error that names the file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.atomic import disk_errors, replace_file
from trinity_vlm.rundir.episode_table import build_episode_table
from trinity_vlm.types import Rollout, ScoredEpisode


def write_table(path: Path, table: pa.Table) -> None:
    """Replace ``path`` atomically. Raises RunDirectoryError when the disk refuses it."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    with disk_errors(path):
        replace_file(path, buffer.getvalue())


def read_table(path: Path) -> pa.Table:
    """Raises RunDirectoryError when the file is damaged or can't be read."""
    try:
        return pq.read_table(path, partitioning=None)
    except (pa.ArrowInvalid, OSError) as error:
        raise RunDirectoryError(f"{path}: damaged: {error}") from error


def write_episode_file(
    path: Path, scored: Sequence[ScoredEpisode], rollouts: Sequence[Rollout], thumbnail_side: int | None
) -> None:
    """Write episodes outside of a run, as a run would; arguments and errors as ``build_episode_table``.

    Raises RunDirectoryError too when the disk refuses it.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, build_episode_table(scored, rollouts, thumbnail_side))
