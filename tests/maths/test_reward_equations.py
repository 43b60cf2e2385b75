"""Eqs. (1) and (2): golden values, the effect of a dispute, unparsed verdicts and the degenerate cases."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from maths_factory import PAPER, candidate, dispute, episode, episodes, solution

from trinity_vlm.config import RewardsConfig
from trinity_vlm.rewards import (
    challenge,
    discounted_difficulty,
    evaluable_correctness,
    factuality,
    questioner_reward,
    questioner_rewards,
    solver_reward,
    solver_rewards,
)
from trinity_vlm.types import QuestionerReward, SolverReward, Tier

HALF_RIGHT = [solution(0, correct=1), solution(1, correct=1), solution(2, correct=0), solution(3, correct=0)]


def test_coefficients_are_the_papers():
    assert (PAPER.alpha_q, PAPER.beta_q, PAPER.rho_f) == (0.3, 0.7, 0.5)
    assert (PAPER.w_c, PAPER.w_r, PAPER.w_f) == (0.5, 0.3, 0.2)


@pytest.mark.parametrize(("fact_q", "corr_a", "fact"), [(0, 0, 0.0), (0, 1, 0.0), (1, 0, 0.5), (1, 1, 1.0)])
def test_factuality(fact_q, corr_a, fact):
    """fact_q = 0 earns nothing even beside a contradictory corr_a = 1."""
    assert factuality(fact_q, corr_a) == fact


@pytest.mark.parametrize(("correct", "chal"), [([], 0.0), ([0, 0], 1.0), ([1, 1, 1], 0.0), ([1, 0, 0, 0], 0.75)])
def test_challenge_is_the_failure_rate(correct, chal):
    assert challenge(correct) == chal


def test_difficulty_keeps_half_when_every_solver_succeeds():
    assert discounted_difficulty(0.7, 0.0) == 0.35
    assert discounted_difficulty(0.7, 1.0) == 0.7


def test_selected_candidate_golden():
    """fact 1, diff 0.7, chal 0.5: 0.3 * 0.7 * 0.75 + 0.7 * 0.5 = 0.5075."""
    (reward,) = questioner_rewards(episode([candidate()], HALF_RIGHT, selected=0), PAPER)
    assert reward.total == pytest.approx(0.5075, abs=1e-12)
    assert (reward.fmt, reward.fact, reward.diff, reward.chal) == (1, 1.0, 0.7, 0.5)
    assert reward.diff_discounted == pytest.approx(0.525, abs=1e-12)


def test_only_the_selected_candidate_gets_challenge():
    """The same candidate unselected: 0.3 * 0.7 * 0.5 = 0.105."""
    rewards = questioner_rewards(episode([candidate(0), candidate(1)], HALF_RIGHT, selected=1), PAPER)
    assert [r.total for r in rewards] == pytest.approx([0.105, 0.5075], abs=1e-12)
    assert [r.chal for r in rewards] == [0.0, 0.5]


def test_nothing_selected_gives_no_challenge_to_anyone():
    rewards = questioner_rewards(episode([candidate(corr=0), candidate(fact=0, corr=0)]), PAPER)
    assert [r.total for r in rewards] == pytest.approx([0.0525, 0.0], abs=1e-12)


def test_overturned_dispute_halves_the_selected_candidate_only():
    """corr_a -> 0, chal against the new reference: 0.5 (0.3 * 0.7 * 0.625 + 0.7 * 0.25) = 0.153125."""
    solved = [solution(i, correct=int(i < 3), before=0) for i in range(4)]
    item = episode([candidate(0), candidate(1)], solved, selected=0, dispute=dispute("majority"))
    selected, other = questioner_rewards(item, PAPER)
    assert selected.total == pytest.approx(0.153125, abs=1e-12)
    assert (selected.fact, selected.chal) == (0.5, 0.25)
    assert (other.fact, other.total) == (1.0, pytest.approx(0.105, abs=1e-12))


def test_dispute_without_verdict_overturns_like_one_with():
    solved = [solution(i, correct=1, before=0) for i in range(4)]
    item = episode([candidate()], solved, selected=0, dispute=dispute("majority", adopted=True))
    assert questioner_rewards(item, PAPER)[0].fact == 0.5


def test_dispute_won_by_the_reference_changes_nothing():
    item = episode([candidate()], [solution(i, correct=0) for i in range(4)], selected=0, dispute=dispute("ref"))
    (reward,) = questioner_rewards(item, PAPER)
    assert reward.total == pytest.approx(0.3 * 0.7 + 0.7, abs=1e-12)


def test_ungrounded_candidate_earns_nothing_however_hard():
    """fact = 0 -> 0."""
    reward = questioner_reward(fmt=1, fact=0.0, diff=1.0, chal=1.0, config=PAPER)
    assert reward.total == 0.0


def test_malformed_candidate_pays_rho_f_and_has_no_terms():
    """fmt = 0 -> -0.5."""
    (reward,) = questioner_rewards(episode([candidate(fmt=False)]), PAPER)
    assert reward == QuestionerReward(fmt=0, fact=0.0, diff=0.0, chal=0.0, diff_discounted=0.0, total=-0.5)


def test_unparsed_screening_counts_zeros_whatever_it_carries():
    (reward,) = questioner_rewards(episode([candidate(parsed=False, fact=1, corr=1, diff=1.0)]), PAPER)
    assert (reward.fmt, reward.fact, reward.diff, reward.total) == (1, 0.0, 0.0, 0.0)


def test_challenge_averages_formatted_solutions_only():
    """Two malformed of four: chal is 1/2 of the formatted two, not 3/4 of all."""
    solved = [solution(0, fmt=False), solution(1, correct=1), solution(2, correct=0), solution(3, fmt=False)]
    (reward,) = questioner_rewards(episode([candidate()], solved, selected=0), PAPER)
    assert reward.chal == 0.5


def test_no_evaluable_solution_gives_no_challenge():
    """All malformed: chal 0, so a question is not rewarded for broken Solver output."""
    solved = [solution(i, fmt=False) for i in range(4)]
    (reward,) = questioner_rewards(episode([candidate()], solved, selected=0), PAPER)
    assert (reward.chal, reward.total) == (0.0, pytest.approx(0.105, abs=1e-12))


@pytest.mark.parametrize(
    ("fmt", "correct", "reason", "total"),
    [(1, 1, 0.5, 0.85), (1, 1, 1.0, 1.0), (1, 1, 0.0, 0.7), (1, 0, 1.0, 0.2), (1, 0, 0.0, 0.2), (0, 1, 1.0, 0.0)],
)
def test_solver_golden(fmt, correct, reason, total):
    """Correctness gates reasoning credit; a malformed solution has nothing."""
    assert solver_reward(fmt, correct, reason, PAPER).total == pytest.approx(total, abs=1e-12)


def test_solver_rewards_are_index_aligned_and_keep_malformed_members():
    solved = [solution(0, fmt=False), solution(1, correct=1, reason=0.5), solution(2, correct=0, reason=1.0)]
    rewards = solver_rewards(episode([candidate()], solved, selected=0), PAPER)
    assert rewards[0] == SolverReward(fmt=0, correct=0, reason=0.0, total=0.0)
    assert [r.total for r in rewards] == pytest.approx([0.0, 0.85, 0.2], abs=1e-12)
    assert rewards[2].reason == 1.0, "the term is kept unmultiplied"


def test_solver_rewards_use_correctness_after_the_dispute():
    (reward,) = solver_rewards(episode([candidate()], [solution(correct=1, before=0)], selected=0), PAPER)
    assert reward.total == pytest.approx(1.0, abs=1e-12)


def test_unparsed_reasoning_counts_zero_whatever_it_carries():
    (reward,) = solver_rewards(episode([candidate()], [solution(reason=1.0, parsed=False)], selected=0), PAPER)
    assert (reward.reason, reward.total) == (0.0, pytest.approx(0.7, abs=1e-12))


def test_unparsed_equivalence_counts_as_wrong_and_stays_evaluable():
    solved = [solution(0, correct=0, tier=Tier.UNPARSED), solution(1, correct=1)]
    (reward,) = questioner_rewards(episode([candidate()], solved, selected=0), PAPER)
    assert reward.chal == 0.5


def test_wrong_solution_may_lack_a_reasoning_verdict():
    """roles.reason_scope = correct skips it; a correct one without a score is an unfinished episode."""
    wrong, right = solution(correct=0, reason=None), solution(correct=1, reason=None)
    assert solver_rewards(episode([candidate()], [wrong], selected=0), PAPER)[0].total == pytest.approx(0.2)
    with pytest.raises(ValueError, match="reasoning has no score"):
        solver_rewards(episode([candidate()], [right], selected=0), PAPER)


def test_ungraded_or_unscreened_episodes_are_refused():
    """Missing verdicts raise: they must not look like zeros."""
    unscreened = replace(candidate(), screening=None)
    with pytest.raises(ValueError, match="never screened"):
        questioner_rewards(episode([unscreened]), PAPER)
    ungraded = replace(solution(), correctness=None, correctness_before_dispute=None)
    for function in (questioner_rewards, solver_rewards):
        with pytest.raises(ValueError, match="no correctness"):
            function(episode([candidate()], [ungraded], selected=0), PAPER)
    with pytest.raises(ValueError, match="correctness_before_dispute"):
        evaluable_correctness([ungraded], before_dispute=True)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_every_coefficient_is_read_from_the_configuration(fact, diff, chal, alpha, rho):
    """Eq. (1) and Eq. (2) recomputed with other coefficients."""
    config = RewardsConfig(alpha_q=alpha, beta_q=1 - alpha, rho_f=rho, w_c=alpha, w_r=rho, w_f=0.1)
    expected = fact * (alpha * diff * (0.5 + 0.5 * chal) + (1 - alpha) * chal)
    assert questioner_reward(1, fact, diff, chal, config).total == pytest.approx(expected, abs=1e-12)
    assert questioner_reward(0, fact, diff, chal, config).total == -rho
    assert solver_reward(1, 1, diff, config).total == pytest.approx(alpha + rho * diff + 0.1, abs=1e-12)


@given(episodes())
def test_rewards_stay_in_range(item):
    """R_Q is -0.5 or in [0, 1], R_S in [0, 1], and only the selected candidate has challenge."""
    for position, reward in enumerate(questioner_rewards(item, PAPER)):
        assert reward.total == -0.5 if not reward.fmt else 0 <= reward.total <= 1
        assert reward.chal == 0 or position == item.selected
    assert all(0 <= reward.total <= 1 + 1e-12 for reward in solver_rewards(item, PAPER))
