"""When do the Solvers contradict the reference strongly enough to ask the Verifier? (Section 2, A.3)

A consensus triggers verification, it never decides: this file only finds it. With n >= 2 formatted answers, grouped by
rule equivalence, the largest group disputes the reference a* when

    |group| >= ceil(majority * n),   its answer differs from a*,   every member has R_correct = 0.

The middle condition needs no check of its own: an answer that equals a* by rule has R_correct = 1 (tier i), so a group
whose members are all wrong holds none.

Degenerate cases: fewer than two formatted answers never dispute; as majority > 1/2, at most one group is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from trinity_vlm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Consensus:
    """A strong majority against the reference, as solution indices.

    ``members`` ascend; the first is the ``representative``, which lends its answer and its trace to the dispute.
    """

    members: tuple[int, ...]

    @property
    def representative(self) -> int:
        return self.members[0]


def majority_threshold(num_answers: int, majority: float) -> int:
    """ceil(majority * num_answers), exact for the decimal number that ``majority`` was written as.

    In floating point 0.56 * 25 is 14.000000000000002 and its ceiling 15; here it is 14.
    Raises ConfigError unless 1/2 < majority <= 1.
    """
    if not 0.5 < majority <= 1:
        raise ConfigError(f"roles.dispute_majority={majority}: must be above 0.5 and at most 1; the paper's is 0.75")
    return math.ceil(Fraction(str(majority)) * num_answers)


def find_consensus(groups: Sequence[Sequence[int]], *, correct: Mapping[int, int], majority: float) -> Consensus | None:
    """The consensus that disputes the reference, or None.

    groups: the formatted solutions' indices, partitioned by rule equivalence of their answers; malformed solutions are
        in no group, so indices may have gaps
    correct: R_correct (all three tiers, against a*) by solution index, for the same solutions
    majority: share of the formatted solutions that must agree

    Example: groups [[0, 2, 3], [4]], all wrong, majority 0.75 -> members (0, 2, 3), representative 0.
    Raises ValueError when ``groups`` does not hold each index of ``correct`` exactly once, ConfigError for a majority
    out of range.
    """
    if sorted(index for group in groups for index in group) != sorted(correct):
        raise ValueError(f"groups={groups!r} must hold each formatted solution of {sorted(correct)} exactly once")
    threshold = majority_threshold(len(correct), majority)
    if len(correct) < 2:
        return None
    largest = max(groups, key=len)
    if len(largest) < threshold or any(correct[index] for index in largest):
        return None
    return Consensus(tuple(sorted(largest)))
