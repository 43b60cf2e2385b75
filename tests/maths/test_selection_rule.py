"""Selection (Section 2): the gate, the argmax and the seeded tie break."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from maths_factory import candidate, candidates

from trinity_vlm.selection import select_candidate


def test_the_hardest_passing_candidate_wins():
    assert select_candidate([candidate(diff=0.1), candidate(diff=0.7), candidate(diff=0.4)], seed=0) == 1


@pytest.mark.parametrize(
    "barred",
    [
        candidate(fmt=False),
        candidate(fact=0, corr=0, diff=1.0),
        candidate(fact=0, corr=1, diff=1.0),
        candidate(fact=1, corr=0, diff=1.0),
        candidate(parsed=False, diff=1.0),
    ],
    ids=["malformed", "ungrounded", "ungrounded-unclamped", "wrong-answer", "unparsed"],
)
def test_each_gate_bars_a_harder_candidate(barred):
    """Format, fact_q, corr_a and a parsed verdict are each necessary."""
    assert select_candidate([barred, candidate(diff=0.1)], seed=0) == 1
    assert select_candidate([barred], seed=0) is None


def test_a_format_invalid_candidate_with_a_verdict_never_passes():
    """The format flag gates on its own, whatever a caller screened."""
    malformed = replace(candidate(diff=1.0), format_valid=False, format_error="late")
    assert select_candidate([malformed], seed=0) is None


def test_no_candidates_select_nothing():
    assert select_candidate([], seed=0) is None


def test_ties_are_broken_evenly_and_only_among_the_hardest():
    """Over 4,000 seeds each of three tied candidates gets a third (within 4 standard deviations), the other nothing."""
    tied = [candidate(diff=0.7), candidate(diff=0.4), candidate(diff=0.7), candidate(diff=0.7)]
    counts = Counter(select_candidate(tied, seed) for seed in range(4000))
    assert set(counts) == {0, 2, 3}
    assert all(abs(count - 4000 / 3) < 4 * (4000 * 2 / 9) ** 0.5 for count in counts.values())


@given(st.lists(candidates), st.integers(0, 2**63 - 1))
def test_selection_is_a_function_of_candidates_and_seed(proposed, seed):
    """Same seed, same choice; the choice passed and nothing that passed is harder."""
    chosen = select_candidate(proposed, seed)
    assert chosen == select_candidate(proposed, seed)
    passed = [c.screening.difficulty for c in proposed if c.format_valid and c.screening.passed]
    if chosen is None:
        assert not passed
    else:
        assert proposed[chosen].screening.difficulty == max(passed)
