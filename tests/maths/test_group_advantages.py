"""Advantages (A.3): golden values, degenerate groups, and groups keyed by episode and role."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from maths_factory import candidate, episode, episodes, score, solution

from trinity_vlm.advantages import collect_rollouts, group_advantages
from trinity_vlm.types import Role, ScoredEpisode

finite = st.floats(-2, 2, allow_nan=False)


def test_one_success_in_four():
    """mean 0.25, population std sqrt(3)/4: 0.75 / 0.4330127 = 1.7320508, -0.5773503 three times."""
    assert group_advantages((1, 0, 0, 0)) == pytest.approx([1.7320508, *[-0.5773503] * 3], abs=1e-7)


def test_all_malformed_group_learns_from_its_raw_rewards():
    assert group_advantages((-0.5,) * 4) == (-0.5,) * 4


@pytest.mark.parametrize("rewards", [(0.2,) * 4, (0.85,) * 6, (0.0,) * 4, (0.7,) * 7, (0.85,), (1.0, 1.0)])
def test_equal_nonnegative_rewards_are_dropped(rewards):
    """Six times 0.85 in float32 has a std of 6e-8, above 1e-8: float64 is part of the rule."""
    assert group_advantages(rewards) == (None,) * len(rewards)


def test_single_negative_member_keeps_its_raw_reward():
    assert group_advantages((-0.5,)) == (-0.5,)


def test_empty_group_has_no_advantages():
    assert group_advantages(()) == ()


def test_member_at_the_mean_is_dropped_and_the_others_are_not():
    low, middle, high = group_advantages((0.0, 0.5, 1.0))
    assert middle is None
    assert (low, high) == pytest.approx((-1.2247449, 1.2247449), abs=1e-6)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        group_advantages((0.5, reward))


def test_epsilon_stands_outside_the_root():
    """A std of 1e-8 sits on the branch: std + 1e-8 halves the advantage; a little less takes the degenerate rule."""
    assert group_advantages((0.0, 2.2e-8)) == pytest.approx([-1.1 / 2.1, 1.1 / 2.1], rel=1e-6)
    assert group_advantages((0.0, 1.8e-8)) == (None, None)


@given(st.lists(finite, min_size=2, max_size=8))
def test_advantages_are_standardised(rewards):
    """Zero mean, unit population std whenever the rewards spread."""
    assume(max(rewards) - min(rewards) > 1e-3)
    advantages = [a or 0.0 for a in group_advantages(rewards)]
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-5)
    assert math.fsum(a * a for a in advantages) / len(advantages) == pytest.approx(1, abs=1e-3)


@given(st.lists(finite, min_size=2, max_size=8), st.floats(0.5, 4), st.floats(-3, 3))
def test_advantages_ignore_shift_and_scale(rewards, scale, shift):
    assume(max(rewards) - min(rewards) > 1e-2)
    moved = group_advantages([scale * reward + shift for reward in rewards])
    assert [a or 0.0 for a in moved] == pytest.approx([a or 0.0 for a in group_advantages(rewards)], abs=1e-4)


@given(st.lists(finite, max_size=8), st.randoms(use_true_random=False))
def test_advantages_follow_their_members(rewards, random):
    """Permuting the group permutes the advantages."""
    order = list(range(len(rewards)))
    random.shuffle(order)
    advantages = group_advantages(rewards)
    assert group_advantages([rewards[i] for i in order]) == tuple(advantages[i] for i in order)


def test_same_image_twice_in_a_step_is_two_groups():
    """Each episode's equal rewards carry no signal; one shared baseline would have invented some."""
    easy = score(episode([candidate()], [solution(i, correct=1) for i in range(4)], selected=0, uid="same.png"))
    hard = score(episode([candidate()], [solution(i, correct=0) for i in range(4)], selected=0, uid="same.png"))
    assert collect_rollouts([easy, hard]) == []


def test_questioner_and_solver_never_share_a_baseline():
    """The rule sees one call per role and episode, in order."""
    seen = []

    def spy(rewards):
        seen.append(tuple(round(reward, 6) for reward in rewards))
        return group_advantages(rewards)

    item = score(episode([candidate(), candidate(fmt=False)], [solution(0), solution(1, correct=0)], selected=0))
    rollouts = collect_rollouts([item, item], rule=spy)
    assert seen == [(0.5075, -0.5), (1.0, 0.2)] * 2
    assert [(r.role, r.slot) for r in rollouts] == [
        (Role.QUESTIONER, 0),
        (Role.QUESTIONER, 1),
        (Role.SOLVER, 0),
        (Role.SOLVER, 1),
    ] * 2


def test_rollouts_carry_reward_advantage_and_their_own_completion():
    item = score(episode([candidate()], [solution(0), solution(1, fmt=False), solution(2)], selected=0, uid="b.png"))
    rollouts = [r for r in collect_rollouts([item]) if r.role is Role.SOLVER]
    assert [r.reward for r in rollouts] == [1.0, 0.0, 1.0]
    assert [r.advantage for r in rollouts] == pytest.approx([0.7071068, -1.4142136, 0.7071068], abs=1e-6)
    assert all(r.image_uid == "b.png" for r in rollouts)
    assert all(r.completion is s.completion for r, s in zip(rollouts, item.episode.solutions, strict=True))


def test_dropped_members_leave_their_slot_number_behind():
    """Rewards 0, 0.5, 1: the middle rollout is dropped, the last keeps slot 2."""
    item = score(episode([candidate()], [solution(i) for i in range(3)], selected=0))
    rewards = tuple(replace(item.solver_rewards[0], total=total) for total in (0.0, 0.5, 1.0))
    rollouts = collect_rollouts([ScoredEpisode(item.episode, item.questioner_rewards, rewards)])
    assert [r.slot for r in rollouts if r.role is Role.SOLVER] == [0, 2]


def test_completion_without_tokens_counts_in_the_baseline_but_is_not_trained_on():
    """A prompt that fills the context yields zero tokens: nothing to differentiate, but a failure all the same."""
    item = score(episode([candidate()], [solution(0), solution(1, fmt=False, tokens=0)], selected=0))
    (rollout,) = [r for r in collect_rollouts([item]) if r.role is Role.SOLVER]
    assert (rollout.slot, rollout.advantage) == (0, pytest.approx(1.0, abs=1e-6))


def test_rule_that_changes_the_length_is_refused():
    item = score(episode([candidate(), candidate()]))
    with pytest.raises(ValueError, match=r"questioner group of a\.png: 2 completions, 2 rewards and 1 advantages"):
        collect_rollouts([item], rule=lambda rewards: rewards[:1])


@given(st.lists(episodes(), max_size=3))
def test_retained_rollouts_always_have_signal_and_tokens(items):
    for rollout in collect_rollouts([score(item) for item in items]):
        assert abs(rollout.advantage) > 1e-6
        assert rollout.completion.token_ids
