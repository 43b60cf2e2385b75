"""A static figure of a run: the reward dynamics of Figure 2, retained rollouts, held-out accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.directory import RunDirectory
from trinity_vlm.rundir.windows import AccuracyPoint, Series, accuracy_points, moving_average, series, smoothing_window

BLUE, ORANGE, GREEN, INK, GRID = "#0072B2", "#D55E00", "#009E73", "#222222", "#DDDDDD"
"""Okabe and Ito's colours, told apart with every common colour blindness: Questioner, Solver, held-out."""

COLUMNS = 3
UNIT_LIMITS = (0.1, 0.2, 0.5, 1.0)
"""Upper ends of an axis from 0: small and large scores both use the height, and panels stay comparable over runs."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot: its title, what the title means, and the metrics drawn in it with their colours and labels."""

    title: str
    meaning: str
    curves: tuple[tuple[str, str, str], ...]
    unit_range: bool = True


PANELS = (
    Panel("fact", "questions grounded and right", (("fact", BLUE, ""),)),
    Panel("diff", "difficulty seen by the Verifier", (("diff", BLUE, ""),)),
    Panel("chal", "Solver failure, 0 unless selected", (("chal", BLUE, ""),)),
    Panel("p_sel", "candidates that were selected", (("p_sel", BLUE, ""),)),
    Panel("correct", "solutions matching the reference", (("correct", ORANGE, ""),)),
    Panel("reason", "reasoning seen by the Verifier", (("reason", ORANGE, ""),)),
    Panel(
        "tokens per solution", "how much the Solver writes", (("response_length/solver", ORANGE, ""),), unit_range=False
    ),
    Panel(
        "retained rollouts",
        "completions trained on",
        (("retained/questioner", BLUE, "Questioner"), ("retained/solver", ORANGE, "Solver")),
        unit_range=False,
    ),
)


def plot_run(run_or_metrics: RunDirectory | Sequence[Mapping[str, float]], out: Path) -> Path:
    """Draw the curves that the metrics hold and save them as ``out`` (.png, .svg or .pdf by its ending).

    Raises RunDirectoryError when the metrics hold none of them, or ``out`` can't be written as such a file.
    """
    metrics = run_or_metrics.read_metrics() if isinstance(run_or_metrics, RunDirectory) else run_or_metrics
    panels = [(panel, curves) for panel in PANELS if (curves := _curves_of(panel, metrics))]
    evaluations = accuracy_points(metrics)
    count = len(panels) + bool(evaluations)
    if not count:
        raise RunDirectoryError("nothing to draw: the metrics hold no finished step yet")
    window = smoothing_window(max((len(curve) for _, curves in panels for curve, _, _ in curves), default=1))
    figure, axes = _grid(count, [int(row["step"]) for row in metrics])
    for axis, (panel, curves) in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, curves, window)
    if evaluations:
        _draw_accuracy(axes[-1], evaluations)
    if panels:
        _draw_key(figure, window)
    return _save(figure, out)


def _curves_of(panel: Panel, metrics: Sequence[Mapping[str, float]]) -> list[tuple[Series, str, str]]:
    found = [(series(metrics, name), color, label) for name, color, label in panel.curves]
    return [curve for curve in found if len(curve[0])]


def _grid(count: int, steps: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Empty panels that share the range of steps."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(3.3 * columns, 5), 2.6 * rows + 0.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    margin = max(0.5, 0.03 * (max(steps) - min(steps)))
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    for index, axis in enumerate(axes):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, colors=INK, length=3)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.set_xlim(min(steps) - margin, max(steps) + margin)
        if index + columns >= count:
            axis.set_xlabel("outer step", fontsize=8, color=INK)
    return figure, axes


def _draw_panel(axis: Axes, panel: Panel, curves: Sequence[tuple[Series, str, str]], window: int) -> None:
    _title(axis, panel.title, panel.meaning)
    for position, (curve, color, label) in enumerate(reversed(curves)):
        axis.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.8, marker=".", markersize=2)
        smooth = moving_average(curve.values, window)
        alone = "o" if len(curve) == 1 else None
        axis.plot(curve.steps, smooth, color=color, linewidth=2, marker=alone, markersize=4)
        axis.text(
            1 - 0.2 * position, 1.03, label, transform=axis.transAxes, ha="right", va="bottom", fontsize=8, color=color
        )
    top = max(max(curve.values) for curve, _, _ in curves)
    limit = next((limit for limit in UNIT_LIMITS if top <= limit), None) if panel.unit_range else None
    if limit is None:
        axis.set_ylim(0, max(top * 1.08, 1))
    else:
        axis.set_ylim(0, limit * 1.02)
        axis.set_yticks([limit * fifth / 5 for fifth in range(6)])


def _draw_accuracy(axis: Axes, points: Sequence[AccuracyPoint]) -> None:
    _title(axis, "held-out accuracy", "Solver, with interval")
    steps, values = [p.step for p in points], [p.value for p in points]
    lengths = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
    axis.errorbar(
        steps, values, yerr=lengths, color=GREEN, linewidth=1.5, marker="o", markersize=4, capsize=3, elinewidth=1
    )
    axis.margins(y=0.15)


def _title(axis: Axes, title: str, meaning: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=18)
    axis.text(0, 1.03, meaning, transform=axis.transAxes, fontsize=8, color="#555555", va="bottom")


def _draw_key(figure: Figure, window: int) -> None:
    """One key for all panels, below them and so over no data."""
    handles = [
        Line2D([], [], color=INK, alpha=0.3, linewidth=0.8, marker=".", markersize=3),
        Line2D([], [], color=INK, linewidth=2),
    ]
    labels = ["mean of one step", f"moving average over {window} step{'s' if window > 1 else ''}"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _save(figure: Figure, out: Path) -> Path:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=160)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{out}: the figure was not written: {error}") from error
    return out
