"""Sending metrics to TensorBoard, Weights & Biases or trackio, besides metrics.jsonl. Each is an optional extra."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trinity_vlm.config import TrackingConfig
from trinity_vlm.errors import TrainingError
from trinity_vlm.machine import found
from trinity_vlm.rundir import RunDirectory


class Tracker(Protocol):
    """One destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one outer step; steps ascend."""
        ...

    def close(self) -> None:
        """Flush and end; nothing may be logged afterwards."""
        ...


class TensorBoardTracker:
    """Event files under ``RUN/events``; a resumed run hides the points after the step it goes on from."""

    def __init__(self, config: TrackingConfig, run: RunDirectory) -> None:
        _import("tensorboard")
        writer_module = importlib.import_module("torch.utils.tensorboard")
        metrics = run.read_metrics()
        next_step = int(metrics[-1]["step"]) + 1 if metrics else 0
        self._writer = writer_module.SummaryWriter(str(run.path / "events"), purge_step=next_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in _finite(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of ``tracking.project`` under the run directory's id, so that a resume goes on in it.

    W&B takes ascending steps only: of a step played again after a kill it shows what it got first.
    """

    def __init__(self, config: TrackingConfig, run: RunDirectory) -> None:
        self._run = _import("wandb").init(
            project=config.project,
            id=run.run_id,
            name=run.path.resolve().name,
            dir=str(run.path),
            resume="allow",
            config=run.config.model_dump(mode="json"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(_finite(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A trackio run named by the run directory's name and id, so that a resume goes on in it.

    trackio only appends: a step played again after a kill has two points there.
    """

    def __init__(self, config: TrackingConfig, run: RunDirectory) -> None:
        self._run = _import("trackio").init(
            project=config.project,
            name=f"{run.path.resolve().name}-{run.run_id}",
            resume="allow",
            config=run.config.model_dump(mode="json"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(_finite(values), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: Mapping[str, Callable[[TrackingConfig, RunDirectory], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def check_trackers(config: TrackingConfig) -> None:
    """Raise TrainingError naming the extra to install when a tracker's package is missing; imports nothing."""
    for name in config.trackers:
        if not found((name,)):
            raise _missing(name, "")


def open_trackers(config: TrackingConfig, run: RunDirectory) -> list[Tracker]:
    """Start every tracker of ``config.trackers``; call it after ``truncate_after`` when resuming.

    Raises TrainingError naming the extra to install when a tracker's package is missing.
    """
    opened: list[Tracker] = []
    try:
        for name in config.trackers:
            opened.append(_TRACKERS[name](config, run))
    except BaseException:
        for tracker in opened:
            tracker.close()
        raise
    return opened


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package, f" ({error})") from None


def _missing(package: str, why: str) -> TrainingError:
    return TrainingError(
        f"tracking.trackers names {package}: not installed{why}; pip install 'trinity-vlm[{package}]', or take it out "
        "of the list"
    )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Trackers show a gap for what metrics.jsonl keeps as null."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
