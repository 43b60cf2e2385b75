"""Metrics of Figure 2 and A.5: denominators, the identity of chal, exact reduction over workers, strict JSON."""

import json
import math
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_factory import candidate, dispute, episode, episodes, score, solution, worker

from trinity_vlm.metrics import MetricSums, metric_sums, step_metrics
from trinity_vlm.types import CallRecord, CallType, QuestionerReward, ScoredEpisode, Tier


def metrics_of(*items):
    part = worker(*items)
    return step_metrics(part.scored, part.rollouts)


MIXED = episode(
    [
        candidate(0, diff=0.7),
        candidate(1, fact=1, corr=0, diff=0.4),
        candidate(2, fmt=False),
        candidate(3, parsed=False),
    ],
    [
        solution(0, correct=1, reason=0.5),
        solution(1, correct=0, reason=1.0, tier=Tier.MODEL),
        solution(2, correct=0, reason=0.0, tier=Tier.NUMERIC_GUARD),
        solution(3, fmt=False),
    ],
    selected=0,
)
EMPTY = episode([candidate(0, fmt=False), candidate(1, fmt=False), candidate(2, fact=0, corr=0, diff=1.0)])


def test_candidate_means_run_over_all_candidates():
    """7 candidates, malformed and unparsed ones as zeros: fact (1 + 0.5) / 7, raw diff (0.7 + 0.4 + 1.0) / 7."""
    found = metrics_of(MIXED, EMPTY)
    assert found["candidates"] == 7
    assert found["fmt_q"] == pytest.approx(4 / 7)
    assert found["fact"] == pytest.approx(1.5 / 7)
    assert found["diff"] == pytest.approx(2.1 / 7)
    assert found["p_sel"] == pytest.approx(1 / 7)
    assert found["chal"] == pytest.approx((2 / 3) / 7)
    assert found["chal_selected"] == pytest.approx(2 / 3)
    assert found["reward_q"] == pytest.approx((0.3 * 0.7 * (5 / 6) + 0.7 * 2 / 3 + 0.5 * 0.3 * 0.2 - 1.5) / 7)


def test_solution_means_run_over_all_solutions_and_reason_over_formatted_ones():
    """correct 1 / 4 with the malformed one as 0; reason, not multiplied by correct, (0.5 + 1 + 0) / 3."""
    found = metrics_of(MIXED, EMPTY)
    assert (found["solutions"], found["reason_count"]) == (4, 3)
    assert found["correct"] == found["correct_before_disputes"] == 0.25
    assert found["fmt_s"] == 0.75
    assert found["reason"] == 0.5
    assert found["reward_s"] == pytest.approx((0.85 + 0.2 + 0.2 + 0.0) / 4)


def test_skipped_reasoning_scores_leave_the_mean_of_reason():
    """roles.reason_scope = correct: the wrong solution was not asked about; an unparsed verdict was, and counts 0."""
    solved = [
        solution(0, correct=1, reason=1.0),
        solution(1, correct=0, reason=None),
        solution(2, reason=0.0, parsed=False),
    ]
    found = metrics_of(episode([candidate()], solved, selected=0))
    assert (found["reason"], found["reason_count"]) == (0.5, 2)


def test_disputes_are_counted_and_values_before_them_kept():
    """Overturned: all four wrong before (chal 1), three right after (chal 0.25), fact halved."""
    overturned = episode(
        [candidate()], [solution(i, correct=int(i < 3), before=0) for i in range(4)], selected=0, dispute=dispute()
    )
    adopted = episode([candidate()], [solution(correct=1, before=0)], selected=0, dispute=dispute(adopted=True))
    upheld = episode([candidate()], [solution(correct=0)], selected=0, dispute=dispute("ref"))
    found = metrics_of(overturned)
    assert (found["correct"], found["correct_before_disputes"]) == (0.75, 0.0)
    assert (found["chal"], found["chal_before_disputes"], found["fact"]) == (0.25, 1.0, 0.5)
    found = metrics_of(overturned, adopted, upheld, MIXED)
    assert [found[f"disputes/{name}"] for name in ("raised", "overturned", "adopted")] == [3, 2, 1]


def test_chal_before_disputes_also_counts_unselected_candidates():
    found = metrics_of(MIXED, EMPTY)
    assert found["chal_before_disputes"] == pytest.approx(found["chal"])


def test_tiers_count_formatted_solutions():
    found = metrics_of(MIXED)
    assert {tier: found[f"tier/{tier}"] for tier in Tier} == {"rule": 1, "model": 1, "numeric_guard": 1, "unparsed": 0}


def test_calls_by_type_and_by_caller():
    calls = [
        CallRecord(CallType.PROPOSE, 10, 5, truncated=False, parsed=True),
        CallRecord(CallType.PROPOSE, 10, 8, truncated=True, parsed=False),
        CallRecord(CallType.SOLVE, 20, 7, truncated=False, parsed=True),
        CallRecord(CallType.SCREEN, 30, 3, truncated=False, parsed=False),
        CallRecord(CallType.DISPUTE, 40, 4, truncated=True, parsed=False),
    ]
    found = metrics_of(episode([candidate()], calls=calls))
    assert (found["calls/propose"], found["prompt_tokens/propose"], found["completion_tokens/propose"]) == (2, 20, 13)
    assert (found["unparsed/propose"], found["truncated/propose"]) == (0.5, 0.5)
    assert (found["unparsed/screen"], found["truncated/screen"]) == (1.0, 0.0)
    assert [found[f"completion_tokens/{who}"] for who in ("questioner", "solver", "verifier")] == [13, 7, 7]
    assert [found[f"truncated/{who}"] for who in ("questioner", "solver", "verifier")] == [0.5, 0.0, 0.5]
    assert [found[f"response_length/{who}"] for who in ("questioner", "solver", "verifier")] == [6.5, 7.0, 3.5]
    assert found["calls/reason"] == 0
    assert "unparsed/reason" not in found


def test_retained_rollouts_per_role():
    found = metrics_of(MIXED, EMPTY)
    assert found["retained/questioner"] == 7
    assert found["retained/solver"] == 4


def test_nothing_at_all_has_counts_of_zero_and_no_means():
    """Means over nothing are left out, so every line is strict JSON."""
    found = step_metrics([], [])
    assert set(found.values()) == {0}
    assert "fact" not in found
    assert {"candidates", "solutions", "selected", "reason_count", "retained/solver", "tier/rule"} <= found.keys()


def test_step_without_selection_has_no_solver_means():
    found = metrics_of(EMPTY)
    assert (found["p_sel"], found["chal"], found["selected"], found["solutions"]) == (0.0, 0.0, 0, 0)
    assert not {"chal_selected", "correct", "reason", "fmt_s"} & found.keys()


def test_reward_that_is_not_finite_is_refused():
    """A custom reward's NaN stops here, before it spoils a metrics file."""
    item = episode([candidate()])
    broken = ScoredEpisode(item, (QuestionerReward(1, 1.0, 0.7, 0.0, 0.35, math.nan),), ())
    with pytest.raises(ValueError, match="NaN"):
        metric_sums([broken], [])


@given(st.lists(episodes(), max_size=6))
def test_mean_challenge_is_selection_rate_times_selected_mean(items):
    """A.5's identity, exactly on the sums and to rounding on the reported numbers."""
    sums = metric_sums([score(item) for item in items], [])
    means = sums.means
    assert means["chal"].total == means["chal_selected"].total
    assert means["p_sel"].total == means["chal_selected"].count == sums.counts["selected"]
    found = sums.finalise()
    if found["candidates"]:
        assert found["chal"] == pytest.approx(found["p_sel"] * found.get("chal_selected", 0.0), abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.lists(episodes(), max_size=3), min_size=1, max_size=4))
def test_workers_reduce_to_the_bits_of_one_worker(parts):
    """Any split and order over workers, idle workers included, finalises to the very numbers of a single process."""
    workers = [worker(*part) for part in parts]
    combined = sum((metric_sums(w.scored, w.rollouts) for w in reversed(workers)), MetricSums()).finalise()
    whole = step_metrics(
        list(chain.from_iterable(w.scored for w in workers)), list(chain.from_iterable(w.rollouts for w in workers))
    )
    assert combined == whole


@given(st.lists(episodes(), max_size=4))
def test_every_value_is_a_strict_json_number(items):
    part = worker(*items)
    found = step_metrics(part.scored, part.rollouts)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert not any(isinstance(value, (bool, Fraction)) for value in found.values())


@given(st.lists(episodes(), min_size=1, max_size=4))
def test_names_are_fixed(items):
    """Counts always appear; means are the only names that may be missing."""
    sums, empty = metric_sums([score(item) for item in items], []), metric_sums([], [])
    assert sums.counts.keys() == empty.counts.keys()
    assert sums.means.keys() == empty.means.keys()
