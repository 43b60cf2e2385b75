"""What becomes of a run directory when training stops early: nothing useless stays, and the way back is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from trinity_vlm.rundir import RunDirectory
from trinity_vlm.rundir.checkpoints import list_checkpoints
from trinity_vlm.rundir.directory import CHECKPOINTS, CONFIG_NAME, ENVIRONMENT_NAME, EPISODES, EVALUATIONS, LOCK_NAME
from trinity_vlm.rundir.manifest import MANIFEST_NAME

FOLDERS = (EPISODES, EVALUATIONS, CHECKPOINTS)
FILES = (MANIFEST_NAME, CONFIG_NAME, ENVIRONMENT_NAME, LOCK_NAME)
"""With the folders all that ``RunDirectory.create`` makes."""


def is_empty(run: RunDirectory) -> bool:
    """Whether nothing was ever recorded: no metrics, no episode, no checkpoint, nor anything that is not the run's."""
    return {str(entry.relative_to(run.path)) for entry in run.path.rglob("*")} <= {*FOLDERS, *FILES}


@contextmanager
def removed_if_empty(run: RunDirectory, console: Console) -> Iterator[None]:
    """Around the training of a run that was just created: when it fails with nothing recorded, what was created goes,
    so that the corrected start is not in its way. Of several workers the one that created it removes it."""
    try:
        yield
    except BaseException:
        if run.writable and is_empty(run):
            _remove(run)
            gone = "could not be removed" if _is_there(run) else "is removed again"
            console.print(f"nothing was recorded yet: {run.path} {gone}", soft_wrap=True, markup=False)
        raise


@contextmanager
def way_back(run: RunDirectory, command: str) -> Iterator[None]:
    """Around training: an interrupt tells from which step the run goes on and with which command, where it stays."""
    try:
        yield
    except KeyboardInterrupt:
        if run.writable and _is_there(run):
            kept = max((step for step, _ in list_checkpoints(run.checkpoints_path)), default=0)
            told = f"after step {kept} of {run.config.steps}" if kept else "with step 1, for there is no checkpoint yet"
            Console(stderr=True).print(f"{command} goes on {told}", markup=False, highlight=False, soft_wrap=True)
        raise


def _is_there(run: RunDirectory) -> bool:
    return (run.path / MANIFEST_NAME).exists()


def _remove(run: RunDirectory) -> None:
    """Only what was made: a folder that was there before stays, and so does what somebody puts into it meanwhile.

    The manifest first, without which the rest counts as a start that was killed, and may be used again; the lock last,
    so that nobody else starts meanwhile.
    """
    steps = [*((run.path / name).unlink for name in FILES[:-1]), *((run.path / name).rmdir for name in FOLDERS)]
    steps += [(run.path / LOCK_NAME).unlink, *([run.path.rmdir] if run.made_folder else [])]
    for step in steps:
        with suppress(OSError):
            step()
