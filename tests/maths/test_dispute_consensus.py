"""Consensus against the reference (Section 2, A.3): its size, its correctness, its representative."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_vlm.disputes import Consensus, find_consensus, majority_threshold
from trinity_vlm.errors import ConfigError


def consensus(groups, right=(), majority=0.75):
    members = [index for group in groups for index in group]
    return find_consensus(groups, correct={index: int(index in right) for index in members}, majority=majority)


@pytest.mark.parametrize(("n", "needed"), [(2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 6), (8, 6)])
def test_three_quarters_round_up(n, needed):
    """The paper's ceil(0.75 n) for every n up to 8: one fewer is no consensus."""
    assert majority_threshold(n, 0.75) == needed
    assert consensus([list(range(needed)), list(range(needed, n))]) == Consensus(tuple(range(needed)))
    assert consensus([list(range(needed - 1)), list(range(needed - 1, n))]) is None


@given(st.integers(0, 400), st.integers(51, 100))
def test_threshold_is_exact_for_every_two_digit_majority(n, percent):
    """Float products such as 0.56 * 25 = 14.000000000000002 must not ask for one member more."""
    assert majority_threshold(n, percent / 100) == math.ceil(Decimal(percent) * n / 100)


def test_float_product_would_have_asked_for_fifteen():
    assert math.ceil(0.56 * 25) == 15
    assert majority_threshold(25, 0.56) == 14


def test_fewer_than_two_formatted_solutions_never_dispute():
    assert consensus([]) is None
    assert consensus([[3]]) is None
    assert consensus([[1, 3]]) == Consensus((1, 3))


def test_one_correct_member_silences_the_dispute():
    """All members must have R_correct = 0; a correct outsider changes nothing."""
    assert consensus([[0, 1, 2], [3]], right={1}) is None
    assert consensus([[0, 1, 2], [3]], right={3}) == Consensus((0, 1, 2))


def test_majority_that_agrees_with_the_reference_is_no_dispute():
    """An answer equal to a* is correct by rule, so the group's members all have R_correct = 1."""
    assert consensus([[0, 1, 2, 3]], right={0, 1, 2, 3}) is None


def test_lowest_index_represents_whatever_the_order():
    """Malformed solutions leave gaps: members stay solution indices."""
    found = consensus([[7], [6, 2, 4]])
    assert found is not None
    assert (found.members, found.representative) == ((2, 4, 6), 2)


def test_smaller_group_listed_first_does_not_hide_the_largest():
    assert consensus([[0], [1, 2, 3]]) == Consensus((1, 2, 3))


def test_groups_must_hold_each_formatted_solution_once():
    for groups in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]]):
        with pytest.raises(ValueError, match="exactly once"):
            find_consensus(groups, correct={0: 0, 1: 0, 2: 0}, majority=0.75)


@pytest.mark.parametrize("majority", [0.5, 0.0, 1.01, float("nan")])
def test_majority_out_of_range_is_refused(majority):
    """At one half or below two groups could both be a majority."""
    with pytest.raises(ConfigError, match="dispute_majority"):
        consensus([[0, 1]], majority=majority)
