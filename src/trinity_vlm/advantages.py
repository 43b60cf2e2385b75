"""Group-relative advantages (Section 2, A.3): per image and role,

    A = (R - mean) / (std + 1e-8)        std: population standard deviation, in float64
    std < 1e-8:  A = R  if the mean is negative, else 0
    |A| <= 1e-6: dropped

Degenerate cases: four malformed candidates (-0.5 each) keep A = -0.5, so an all-malformed group still learns; any other
group of equal rewards, single-member groups included, is dropped. In float32 six equal rewards of 0.85 have
a std of 6e-8 and would pass as signal: hence Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trinity_vlm.types import Candidate, Role, Rollout, ScoredEpisode, Solution

STD_EPSILON = 1e-8
DROP_BELOW = 1e-6

AdvantageRule = Callable[[Sequence[float]], Sequence[float | None]]


def group_advantages(rewards: Sequence[float]) -> tuple[float | None, ...]:
    """Advantages of one group, index-aligned with ``rewards``; None marks a dropped rollout.

    Example: (1, 0, 0, 0) -> (1.7320508, -0.5773503, -0.5773503, -0.5773503).
    Raises ValueError for a reward that is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards={list(rewards)}: every reward of a group must be finite")
    if not rewards:
        return ()
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if std >= STD_EPSILON:
        advantages = [(reward - mean) / (std + STD_EPSILON) for reward in rewards]
    elif mean < 0:
        advantages = list(rewards)
    else:
        advantages = [0.0] * len(rewards)
    return tuple(advantage if abs(advantage) > DROP_BELOW else None for advantage in advantages)


def collect_rollouts(scored: Sequence[ScoredEpisode], rule: AdvantageRule = group_advantages) -> list[Rollout]:
    """The retained rollouts of a step, in the order of episodes, Questioner before Solver, slots ascending.

    One group is one role of one episode, so two episodes of the same image never share a baseline. A completion
    without tokens (no room left in the context) counts in its group's baseline but has nothing to train on.
    """
    rollouts: list[Rollout] = []
    for item in scored:
        uid = item.episode.image.uid
        questioner = [reward.total for reward in item.questioner_rewards]
        solver = [reward.total for reward in item.solver_rewards]
        rollouts += _group_rollouts(Role.QUESTIONER, uid, item.episode.candidates, questioner, rule)
        rollouts += _group_rollouts(Role.SOLVER, uid, item.episode.solutions, solver, rule)
    return rollouts


def _group_rollouts(
    role: Role,
    image_uid: str,
    members: Sequence[Candidate | Solution],
    rewards: Sequence[float],
    rule: AdvantageRule,
) -> list[Rollout]:
    advantages = rule(rewards)
    if not len(members) == len(rewards) == len(advantages):
        raise ValueError(
            f"{role} group of {image_uid}: {len(members)} completions, {len(rewards)} rewards and {len(advantages)} "
            "advantages; reward functions and advantage rules must keep the length"
        )
    return [
        Rollout(
            role=role,
            image_uid=image_uid,
            slot=slot,
            prompt=member.prompt,
            completion=member.completion,
            reward=reward,
            advantage=advantage,
        )
        for slot, (member, reward, advantage) in enumerate(zip(members, rewards, advantages, strict=True))
        if advantage is not None and member.completion.token_ids
    ]
