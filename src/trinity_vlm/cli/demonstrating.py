"""``trinity-vlm demo``: watch a VLM question, solve, verify and improve itself."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trinity_vlm.cli.console import duration, percent, points
from trinity_vlm.cli.invocation import invocation
from trinity_vlm.cli.leaving import removed_if_empty, way_back
from trinity_vlm.cli.training import evolve_on_console, prompt_digest
from trinity_vlm.config import Config
from trinity_vlm.demo import (
    LONG_STEPS,
    SHORT_STEPS,
    Row,
    Summary,
    demo_config,
    photo_config,
    photo_folder,
    save_picture,
    summarise,
)
from trinity_vlm.rundir import RunDirectory, latest_checkpoint
from trinity_vlm.workers import Workers

SAME_COMMAND = "the same command"
"""What an interrupted demo goes on with; `resume` would leave out its summary."""


def demo(
    path: Annotated[Path, typer.Option("--run-dir", help="where the run is written")] = Path("runs/demo"),
    long: Annotated[bool, typer.Option("--long", help=f"{LONG_STEPS} outer steps instead of {SHORT_STEPS}")] = False,
    photos: Annotated[bool, typer.Option(help="afterwards, a few steps on ordinary pictures")] = True,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a setting to change, e.g. steps=5")
    ] = None,
) -> None:
    """Train the embedded 5 M-parameter VLM on unlabeled images and show what happened.

    A line a step shows the rewards under the names of the paper's Figure 2. Before and after, the Solver answers the
    same held-out problems with known answers. An interrupted demo goes on where it stopped.
    """
    console = Console()
    started = time.monotonic()
    config = demo_config(LONG_STEPS if long else SHORT_STEPS, settings or [])
    path = path.with_name(path.name + "-long") if long and path == Path("runs/demo") else path
    console.print("One VLM asks, verifies and solves; the images carry no labels.", style="bold")
    if not (photos and _only_pictures_left(path)):
        path = _train(path, config, console)
    show(summarise(RunDirectory.open(path)), console)
    if photos:
        console.rule("the same loop on a folder of ordinary pictures")
        _train(path.with_name(path.name + "-pictures"), photo_config(photo_folder(), settings or []), console)
    console.print(f"total time {duration(time.monotonic() - started)}; look at {path / 'figure.png'}")
    arguments = shlex.join(["play", str(save_picture(RunDirectory.open(path))), "--run", str(path)])
    console.print(
        f"one episode up close, on a picture it was not trained on:  {invocation()} {arguments}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _train(path: Path, config: Config, console: Console) -> Path:
    """Start, or go on with, a run at ``path``; a finished one is left alone and the next free name is used."""
    from trinity_vlm.assembly import check

    stem, number = path, 2
    while (path / "manifest.json").exists() and _is_finished(path):
        path = stem.with_name(f"{stem.name}-{number}")
        number += 1
    if (path / "manifest.json").exists():
        console.print(f"going on with {path}")
        with RunDirectory.resume(path, config, prompt_digest=prompt_digest(config)) as run, way_back(run, SAME_COMMAND):
            evolve_on_console(run, console, Workers())
        return path
    check(config)
    created = RunDirectory.create(path, config, prompt_digest=prompt_digest(config))
    with created as run, way_back(run, SAME_COMMAND), removed_if_empty(run, console):
        evolve_on_console(run, console, Workers())
    return path


def _only_pictures_left(path: Path) -> bool:
    """Whether a demo at ``path`` was interrupted among the pictures."""
    pictures = path.with_name(path.name + "-pictures")
    started = all((folder / "manifest.json").exists() for folder in (path, pictures))
    return started and _is_finished(path) and not _is_finished(pictures)


def _is_finished(path: Path) -> bool:
    run = RunDirectory.open(path)
    last = latest_checkpoint(run.checkpoints_path)
    return last is not None and last.name == f"step-{run.config.steps:06d}"


def show(summary: Summary, console: Console) -> None:
    """Print the summary: curves, truth, and the change of held-out accuracy with its interval."""
    span = f"first {summary.window} steps", f"last {summary.window} steps"
    console.print(_table("what the loop saw (means over all candidates and solutions)", span, summary.curves))
    console.print(_table("the same, judged by the truth the loop never sees", span, summary.truths))
    if summary.before is None or summary.after is None or summary.change is None:
        return
    console.print(f"held-out Solver accuracy on the same {summary.problems} problems, 95 % intervals:", style="bold")
    console.print(f"  before  {percent(summary.before)}", highlight=False)
    console.print(f"  after   {percent(summary.after)}   after {summary.steps} outer steps", highlight=False)
    console.print(f"  change  {points(summary.change)}   {verdict(summary)}", highlight=False)


def verdict(summary: Summary) -> str:
    """The change in words; never more than the interval says."""
    change = summary.change
    if change is None:
        return ""
    if change.low > 0:
        return "(a rise: the interval is above zero)"
    if change.high < 0:
        return "(a fall: the interval is below zero)"
    return "(the interval holds zero: no change can be told from this many steps and problems)"


def _table(title: str, span: tuple[str, str], rows: tuple[Row, ...]) -> Table:
    table = Table("", *span, title=title, title_justify="left")
    for row in rows:
        table.add_row(row.name, f"{row.first:.3f}", f"{row.last:.3f}")
    return table
