"""``trinity-vlm train`` and ``trinity-vlm resume``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trinity_vlm.cli.console import ConsoleReporter, plan, timestamp
from trinity_vlm.cli.doctoring import all_well, examine
from trinity_vlm.cli.invocation import as_typed, invocation
from trinity_vlm.cli.leaving import removed_if_empty, way_back
from trinity_vlm.config import Config, apply_overrides, build_config, load_config
from trinity_vlm.errors import ConfigError
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.rundir.figure import plot_run
from trinity_vlm.workers import Workers

Opener = Callable[..., RunDirectory]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="settings to change; `trinity-vlm keys` lists all"),
]


def train(
    source: Annotated[
        str, typer.Argument(metavar="PRESET|CONFIG.yaml", help="tiny, qwen3-vl-8b, qwen2.5-vl-7b, or a file")
    ],
    overrides: Overrides = None,
) -> None:
    """Train a VLM on unlabeled images.

    The model asks questions about the images, verifies and solves them, and learns from the outcome; no label is read.

        trinity-vlm train tiny                                    two CPU cores, about seven minutes
        trinity-vlm train tiny images.source=photos/ steps=20     your own folder
        trinity-vlm train qwen3-vl-8b images.source='shards/*.parquet' dry_run=true

    Everything is written below run_dir; a run killed at any moment goes on with `trinity-vlm resume RUN`.

    Exits with 2 when a setting or a file that it names is at fault, with 1
    when this machine can't run it or the run fails. dry_run=true stops after
    the checks: with 2 as above, else with what `doctor` says of the same run.
    An interrupted run exits with 130 and says how it goes on.
    """
    from trinity_vlm.assembly import check_machine, check_settings

    config = load_config(source, overrides or [])
    workers = Workers.from_environment()
    console = Console(quiet=not workers.is_main)
    check_settings(config, workers)
    if config.run_dir:
        RunDirectory.check_free(config.run_dir)
    console.print(plan(config))
    if config.dry_run:
        _finish_dry_run(config, console, workers)
        return
    check_machine(config, workers)
    path = workers.gather(Path(config.run_dir or f"runs/{Path(source).stem}-{timestamp()}"))[0]
    with (
        open_shared(workers, path, config, RunDirectory.create) as run,
        way_back(run, resuming(path, workers)),
        removed_if_empty(run, console),
    ):
        evolve_on_console(run, console, workers)


def _finish_dry_run(config: Config, console: Console, workers: Workers) -> None:
    """After ``check_settings``: what `doctor` says of the same run on this machine, with its exit code."""
    console.print(
        as_typed(
            "dry run: settings and prompts are fine, images were found (`trinity-vlm images SOURCE` opens them); no "
            "weights were loaded, nothing was written; whether this machine can run it, as doctor tells:"
        ),
        markup=False,
        soft_wrap=True,
    )
    if not all_well(*examine(config, console, workers=workers.world)):
        raise typer.Exit(1)


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")],
    overrides: Overrides = None,
) -> None:
    """Go on with a run from its last checkpoint, exactly as if it had never stopped.

    A finished run is extended with a higher number of steps:  trinity-vlm resume RUN steps=500
    (the learning rate then follows the schedule of the longer run).
    """
    config = _changed(RunDirectory.open(path).config, overrides or [])
    workers = Workers.from_environment()
    with open_shared(workers, path, config, RunDirectory.resume) as run, way_back(run, resuming(path, workers)):
        evolve_on_console(run, Console(quiet=not workers.is_main), workers)


def resuming(path: Path, workers: Workers) -> str:
    """What to type to go on with the run at ``path``."""
    arguments = shlex.join(["resume", str(path)])
    if workers.world > 1:
        return f"torchrun as before, with `-m trinity_vlm {arguments}`,"
    return f"`{invocation()} {arguments}`"


def open_shared(workers: Workers, path: Path, config: Config, opener: Opener) -> RunDirectory:
    """The main worker creates or resumes the run and holds its lock; the others then open it to read."""
    run = opener(path, config, prompt_digest=prompt_digest(config)) if workers.is_main else None
    workers.gather(None)
    return run or RunDirectory.open(path)


def evolve_on_console(run: RunDirectory, console: Console, workers: Workers) -> None:
    """Train with a line a step, then draw the run's figure."""
    from trinity_vlm.loop import evolve

    console.print(f"run directory: {run.path}", markup=False, soft_wrap=True)
    evolve(run.config, run, ConsoleReporter(console, run.config.evaluation.source))
    if workers.is_main and (metrics := run.read_metrics()):
        if skipped := _skipped(metrics[-1]):
            console.print(f"images skipped, again in every epoch: {skipped}", markup=False, soft_wrap=True)
        figure = plot_run(run, run.path / "figure.png")
        console.print(f"done; figure: {figure}", soft_wrap=True)


def _skipped(metrics: Mapping[str, float]) -> str:
    """For example ``"1 undecodable, 2 too_small"``; empty when every image could be used."""
    kind = "images/skipped/"
    counts = {key.removeprefix(kind): int(value) for key, value in metrics.items() if key.startswith(kind)}
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def prompt_digest(config: Config) -> str:
    """Fingerprint of the prompts a configuration uses."""
    from trinity_vlm.roles import PromptSet

    return PromptSet.load(config.roles.prompts).digest


def _changed(stored: Config, overrides: list[str]) -> Config:
    values = stored.model_dump(mode="json")
    apply_overrides(values, overrides)
    config = build_config(values)
    if config.dry_run:
        raise ConfigError("dry_run=true: a resumed run has been checked already; leave it out")
    return config
