"""An advantage rule of your own: the reward minus its group's mean, not divided by the standard deviation.

    PYTHONPATH=examples trinity-vlm train tiny steps=5 rewards.advantages=own_advantage:centred

A rule gets the rewards of one group (one image, one role) and returns as many advantages; None drops a rollout.
Without the division, groups that nearly agree push less than groups that are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

DROP_BELOW = 1e-6


def centred(rewards: Sequence[float]) -> tuple[float | None, ...]:
    """A = R - mean; rewards (1, 0, 0, 0) give (0.75, -0.25, -0.25, -0.25), equal ones are dropped."""
    mean = fsum(rewards) / max(1, len(rewards))
    return tuple(reward - mean if abs(reward - mean) > DROP_BELOW else None for reward in rewards)
