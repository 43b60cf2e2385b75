"""Window arithmetic by hand, and a figure that shows exactly what the metrics hold."""

import math
import subprocess
import sys

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.figure import plot_run
from trinity_vlm.rundir.windows import (
    AccuracyPoint,
    EdgeMeans,
    accuracy_points,
    edge_means,
    moving_average,
    series,
    smoothing_window,
)


def test_moving_average_by_hand():
    """A trailing mean over up to ``window`` values."""
    assert moving_average([1, 2, 6, 4], 2) == [1, 1.5, 4, 5]
    assert moving_average([1, 2, 6], 1) == [1, 2, 6]
    assert moving_average([], 15) == []
    with pytest.raises(ValueError, match="window=0"):
        moving_average([1], 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 20))
def test_moving_average_stays_in_range_and_keeps_constants(values, window):
    """As many values as before, within their range; a constant stays constant."""
    smooth = moving_average(values, window)
    assert len(smooth) == len(values)
    assert min(values) - 1e-12 <= min(smooth)
    assert max(smooth) <= max(values) + 1e-12
    assert moving_average([0.3] * len(values), window) == pytest.approx([0.3] * len(values))


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (3, 1), (8, 2), (40, 10), (59, 14), (60, 15), (300, 15)])
def test_the_window_shrinks_with_short_runs(steps, window):
    """15 steps as in Figure 2, a quarter of a shorter run."""
    assert smoothing_window(steps) == window


def test_first_and_last_windows_by_hand():
    """50 steps each as in Appendix A.5; halves of a short run, so that they never overlap."""
    values = [0.2] * 50 + [9.0] * 200 + [0.6] * 50
    assert edge_means(values) == EdgeMeans(pytest.approx(0.2), pytest.approx(0.6), 50)
    assert edge_means([1, 2, 3, 10, 20]) == EdgeMeans(1.5, 15, 2)
    assert edge_means([1]) is None


def test_series_leave_out_what_was_not_measured():
    """Steps without the metric or with NaN have no point; evaluations without an interval get an empty one."""
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "fact": 0.1},
        {"step": 2, "fact": math.nan},
        {"step": 4, "fact": 0.3},
    ]
    assert series(rows, "fact").steps == (1, 4)
    assert series(rows, "fact").values == (0.1, 0.3)
    assert len(series(rows, "absent")) == 0
    rows.append({"step": 9, "eval/accuracy": 0.7, "eval/accuracy_low": 0.6, "eval/accuracy_high": 0.75})
    assert accuracy_points(rows) == [AccuracyPoint(0, 0.5, 0.5, 0.5), AccuracyPoint(9, 0.7, 0.6, 0.75)]


def rows(steps):
    names = ("fact", "diff", "chal", "p_sel", "correct", "reason")
    return [
        {"step": s} | {name: (i + 1) / 10 for i, name in enumerate(names)} | {"retained/questioner": 4.0}
        for s in range(1, steps + 1)
    ]


@pytest.mark.parametrize("steps", [1, 40])
def test_every_curve_that_is_there_is_drawn(tmp_path, steps, monkeypatch):
    """One panel per metric with data, a held-out panel only with evaluations; the key tells the window."""
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    text = plot_run(rows(steps), tmp_path / "figure.svg").read_text()
    for title in ("fact", "diff", "chal", "p_sel", "correct", "reason", "retained rollouts"):
        assert f">{title}</text>" in text
    assert "held-out accuracy" not in text
    assert f"moving average over {smoothing_window(steps)} step" in text
    evaluated = [*rows(steps), {"step": steps + 1, "eval/accuracy": 0.5}]
    assert ">held-out accuracy</text>" in plot_run(evaluated, tmp_path / "figure.svg").read_text()


def test_partial_metrics_draw_what_they_hold(tmp_path):
    """A run with one metric, or with evaluations only, still gives a picture; none at all is an error."""
    assert Image.open(plot_run([{"step": 1, "fact": 0.5}], tmp_path / "sub" / "a.png")).width > 300
    assert Image.open(plot_run([{"step": 0, "eval/accuracy": 0.5}], tmp_path / "b.png")).width > 300
    for empty in ([], [{"step": 1, "other": 3.0}]):
        with pytest.raises(RunDirectoryError, match="nothing to draw"):
            plot_run(empty, tmp_path / "c.png")
    with pytest.raises(RunDirectoryError, match="not written"):
        plot_run([{"step": 1, "fact": 0.5}], tmp_path / "c.unknown")


def test_reading_and_drawing_runs_never_loads_torch():
    """The report builds on these modules; none of them may pull in torch or open a window system."""
    code = (
        "import sys, trinity_vlm.rundir, trinity_vlm.rundir.figure, trinity_vlm.rundir.pairs;"
        "assert 'torch' not in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
