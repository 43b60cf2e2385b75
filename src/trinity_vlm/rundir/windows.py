"""From a run's metrics to the curves and window means of Figure 2 (Appendix A.5); drawing is elsewhere.

Curves are per-step means with a 15-step moving average; first and last windows average 50 step means each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOVING_AVERAGE_STEPS = 15
EDGE_WINDOW_STEPS = 50


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps that have it; ``steps`` ascend, ``values`` are finite, both of length N."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class EdgeMeans:
    """Mean of the first and of the last ``window`` step means; the two windows never overlap."""

    first: float
    last: float
    window: int


@dataclass(frozen=True, slots=True)
class AccuracyPoint:
    """One held-out evaluation; ``low`` and ``high`` bound its interval, both equal to ``value`` when none was given."""

    step: int
    value: float
    low: float
    high: float


def series(metrics: Sequence[Mapping[str, float]], name: str) -> Series:
    """The metric ``name``; steps without it, or with NaN, are left out."""
    points = [(int(row["step"]), row[name]) for row in metrics if name in row and math.isfinite(row[name])]
    return Series(name, tuple(step for step, _ in points), tuple(value for _, value in points))


def smoothing_window(num_steps: int) -> int:
    """15 steps, or a quarter of a run shorter than 60: ``300 -> 15, 40 -> 10, 3 -> 1``."""
    return min(MOVING_AVERAGE_STEPS, max(1, num_steps // 4))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the up to ``window - 1`` before it; ``([1, 2, 6], 2) -> [1, 1.5, 4]``."""
    if window < 1:
        raise ValueError(f"window={window} must be at least 1")
    spans = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [math.fsum(span) / len(span) for span in spans]


def edge_means(values: Sequence[float], window: int = EDGE_WINDOW_STEPS) -> EdgeMeans | None:
    """First- and last-window means, windows cut to half of a short run; None with fewer than two values."""
    width = min(window, len(values) // 2)
    if width < 1:
        return None
    return EdgeMeans(math.fsum(values[:width]) / width, math.fsum(values[-width:]) / width, width)


def accuracy_points(metrics: Sequence[Mapping[str, float]]) -> list[AccuracyPoint]:
    """Held-out evaluations: rows with ``eval/accuracy``, and its interval when ``_low`` and ``_high`` are there."""
    points = []
    for row in metrics:
        value = row.get("eval/accuracy", math.nan)
        if math.isfinite(value):
            low, high = (_finite_or(row.get(f"eval/accuracy_{end}"), value) for end in ("low", "high"))
            points.append(AccuracyPoint(int(row["step"]), value, low, high))
    return points


def _finite_or(value: float | None, default: float) -> float:
    return default if value is None or not math.isfinite(value) else value
