"""Intervals for accuracies and for paired changes; plain formulas, no dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate with its two-sided 95 % interval; fractions, not percent."""

    value: float
    low: float
    high: float


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson score interval of a proportion; raises ValueError for an empty sample."""
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"successes={successes} of total={total}: need 0 <= successes <= total and total >= 1")
    p = successes / total
    spread = Z_95**2 / total
    center = (p + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(p * (1 - p) / total + spread / (4 * total))
    return Interval(p, max(0.0, center - half), min(1.0, center + half))


def paired_change(before: Sequence[bool], after: Sequence[bool]) -> Interval:
    """Mean change of accuracy on the same problems, with the normal interval of the paired differences.

    Each difference is -1, 0 or 1; the standard error uses their sample variance, which is far below that of two
    independent samples because problems both runs solve cancel. Raises ValueError for unequal or tiny samples.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"paired_change needs two samples of the same size >= 2, got {len(before)} and {len(after)}")
    n = len(before)
    gained = sum(1 for b, a in zip(before, after, strict=True) if a and not b)
    lost = sum(1 for b, a in zip(before, after, strict=True) if b and not a)
    mean = (gained - lost) / n
    variance = ((gained + lost) - n * mean**2) / (n - 1)
    half = Z_95 * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half)
