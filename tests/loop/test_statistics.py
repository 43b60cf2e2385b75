"""Intervals against hand-worked values."""

import pytest

from trinity_vlm.statistics import paired_change, wilson_interval


def test_wilson_interval_of_235_out_of_360():
    """65.3 % of 360: the paper's SciVQR-Bio value; half-width about 4.9 points."""
    interval = wilson_interval(235, 360)
    assert interval.value == pytest.approx(0.65278, abs=1e-5)
    assert (interval.low, interval.high) == pytest.approx((0.60222, 0.70014), abs=1e-4)


def test_wilson_interval_stays_inside_zero_and_one():
    assert wilson_interval(0, 10).low == 0
    assert wilson_interval(0, 10).high == pytest.approx(0.27753, abs=1e-4)
    assert wilson_interval(10, 10).high == pytest.approx(1)


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_interval_refuses_what_is_no_proportion(successes, total):
    with pytest.raises(ValueError, match="total"):
        wilson_interval(successes, total)


def test_paired_change_counts_only_what_changed():
    """100 problems, 6 gained and 2 lost: +4 points, sample variance (8 - 100 * 0.04^2) / 99, by hand."""
    before = [False] * 6 + [True] * 2 + [True] * 92
    after = [True] * 6 + [False] * 2 + [True] * 92
    change = paired_change(before, after)
    half = 1.959964 * ((8 - 0.16) / 99 / 100) ** 0.5
    assert change.value == pytest.approx(0.04)
    assert (change.low, change.high) == pytest.approx((0.04 - half, 0.04 + half))


def test_the_same_answers_are_no_change_with_no_width():
    change = paired_change([True, False] * 5, [True, False] * 5)
    assert (change.value, change.low, change.high) == (0, 0, 0)


def test_paired_change_refuses_samples_that_are_not_pairs():
    with pytest.raises(ValueError, match="same size"):
        paired_change([True], [True, False])
