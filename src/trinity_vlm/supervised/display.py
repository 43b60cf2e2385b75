"""Progress of a supervised run on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from trinity_vlm.supervised.training import Progress


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """A bar with loss, rate and remaining time; yields the function to report progress to."""
    columns = (
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.0f} examples/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("train", total=None, loss=float("nan"), rate=0.0)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                total=progress.steps,
                completed=progress.step,
                loss=progress.loss,
                rate=progress.examples_per_second,
            )

        yield show
