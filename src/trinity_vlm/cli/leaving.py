"""What becomes of a run directory when training stops early: nothing useless stays, and the way back is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from trinity_vlm.rundir import RunDirectory
from trinity_vlm.rundir.checkpoints import list_checkpoints
from trinity_vlm.rundir.manifest import MANIFEST_NAME


@contextmanager
def removed_if_empty(run: RunDirectory, console: Console) -> Iterator[None]:
    """Around the training of a run that was just created: when it fails with nothing recorded, what was created goes,
    so that the corrected start is not in its way. Of several workers the one that created it removes it."""
    try:
        yield
    except BaseException:
        if run.writable and run.is_empty:
            gone = "is removed again" if run.discard() else "could not be removed"
            console.print(f"nothing was recorded yet: {run.path} {gone}", soft_wrap=True, markup=False)
        raise


@contextmanager
def way_back(run: RunDirectory, command: str) -> Iterator[None]:
    """Around training: an interrupt tells from which step the run goes on and with which command, where it stays."""
    try:
        yield
    except KeyboardInterrupt:
        if run.writable and (run.path / MANIFEST_NAME).exists():
            kept = max((step for step, _ in list_checkpoints(run.checkpoints_path)), default=0)
            told = f"after step {kept} of {run.config.steps}" if kept else "with step 1, for there is no checkpoint yet"
            Console(stderr=True).print(f"{command} goes on {told}", markup=False, highlight=False, soft_wrap=True)
        raise
