"""What becomes of a run directory when training stops early: nothing useless stays, and the way back is told."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from trinity_vlm.cli.invocation import as_typed
from trinity_vlm.rundir import RunDirectory, latest_checkpoint
from trinity_vlm.rundir.directory import CHECKPOINTS, CONFIG_NAME, ENVIRONMENT_NAME, EPISODES, EVALUATIONS, LOCK_NAME
from trinity_vlm.rundir.manifest import MANIFEST_NAME

NEW = {CHECKPOINTS, CONFIG_NAME, ENVIRONMENT_NAME, EPISODES, EVALUATIONS, LOCK_NAME, MANIFEST_NAME}
"""All that ``RunDirectory.create`` makes."""


def steps_kept(run: RunDirectory) -> int:
    """Outer steps after which a resume goes on: those of the last checkpoint, 0 without one."""
    last = latest_checkpoint(run.checkpoints_path)
    return 0 if last is None else int(last.name.rpartition("-")[2])


def is_empty(run: RunDirectory) -> bool:
    """Whether nothing was ever recorded: no metrics, no episode, no checkpoint, nor anything that is not the run's."""
    return {entry.name for entry in run.path.rglob("*")} <= NEW


@contextmanager
def removed_if_empty(run: RunDirectory, console: Console) -> Iterator[None]:
    """Around the training of a run that was just created: when it fails with nothing recorded, its folder goes, so that
    the corrected start is not in its way. Of several workers the one that created it removes it."""
    try:
        yield
    except BaseException:
        if run.writable and is_empty(run):
            shutil.rmtree(run.path, ignore_errors=True)
            console.print(f"nothing was recorded yet: {run.path} is removed again", soft_wrap=True, markup=False)
        raise


@contextmanager
def way_back(run: RunDirectory, how: str | None = None) -> Iterator[None]:
    """Around training: an interrupt tells from which step the run goes on and how; by default with `resume`."""
    try:
        yield
    except KeyboardInterrupt:
        if run.writable and not is_empty(run):
            command = how or as_typed(f"`trinity-vlm resume {shlex.quote(str(run.path))}`")
            kept = steps_kept(run)
            told = f"after step {kept} of {run.config.steps}" if kept else "with step 1, for there is no checkpoint yet"
            Console(stderr=True).print(f"{command} goes on {told}", markup=False, highlight=False, soft_wrap=True)
        raise
