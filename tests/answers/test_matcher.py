"""The Matcher: settings, cache, counters, threads, closing; and grouping for disputes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from answer_pairs import AMBIGUOUS, MATCH, MISMATCH, flatten
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_vlm.answers import Matcher, SymbolicCounters, group_equivalent, match
from trinity_vlm.config import MatcherConfig
from trinity_vlm.errors import TrinityError

RULES_ONLY = MatcherConfig(symbolic=False)


@pytest.fixture
def rules():
    with Matcher(RULES_ONLY) as matcher:
        yield matcher


def test_settings_reach_the_rules():
    """relative_tolerance and integer_exact of the configuration decide."""
    strict = Matcher(MatcherConfig(symbolic=False, relative_tolerance=0.001))
    loose = Matcher(MatcherConfig(symbolic=False, integer_exact=False))
    assert strict.match("100", "100.4").status == "mismatch"
    assert loose.match("100", "100.4").status == "match"
    assert loose.match("2007", "2008").status == "match"
    assert strict.match("2007", "2008").status == "ambiguous"


def test_tolerance_is_a_share_of_the_reference():
    """Inclusive at the edge; the absolute floor applies only to a reference of exactly 0."""
    assert match("100.0", "101.0", integer_exact=False).status == "match"
    assert match("100.5", "101.51").status == "mismatch"
    assert match("0", "1e-9").status == "match"
    assert match("0", "1.1e-9").status == "mismatch"
    assert match("1e-12", "2e-12").status == "mismatch"


def test_symbolic_calls_are_cached_and_counted():
    """The same pair asks a worker once, from the main thread or any other."""
    with Matcher(MatcherConfig(symbolic_deadline=20.0)) as matcher:
        assert matcher.counters == SymbolicCounters()
        first = matcher.match("2(x+1)", "2x+2")
        with ThreadPoolExecutor(4) as threads:
            again = list(threads.map(lambda _: matcher.match("2(x+1)", "2x+2"), range(16)))
        assert first.status == "match"
        assert set(again) == {first}
        assert matcher.counters == SymbolicCounters(calls=1)


def test_symbolic_off_means_ambiguous(rules):
    assert rules.match("2(x+1)", "2x+2").status == "ambiguous"
    assert rules.counters == SymbolicCounters()


def test_question_and_options_are_part_of_the_cache_key(rules):
    assert rules.match("B", "12 cm").status == "ambiguous"
    assert rules.match("B", "12 cm", options=["10 cm", "12 cm"]).status == "match"
    assert rules.match("50", "0.5 m").status == "ambiguous"
    assert rules.match("50", "0.5 m", "What is the length in cm?").status == "match"


def test_cache_is_bounded(rules):
    for n in range(Matcher.CACHE_SIZE + 10):
        rules.match("1", str(n))
    rules.match("1", "9" * 100_000)
    assert len(rules._cache) == Matcher.CACHE_SIZE
    assert sum(len(key[1]) for key in rules._cache) < 10 * Matcher.CACHE_SIZE


def test_closed_matcher_says_so():
    matcher = Matcher(MatcherConfig())
    matcher.close()
    matcher.close()
    assert matcher.match("1/2", "0.5").status == "match"
    with pytest.raises(TrinityError, match="closed"):
        matcher.match("2(x+1)", "2x+2")


def test_concurrent_matching_equals_serial_matching(rules):
    pairs = [p for table in (MATCH, MISMATCH, AMBIGUOUS) for p in flatten(table)]
    with ThreadPoolExecutor(8) as threads:
        concurrent = list(threads.map(lambda p: rules.match(*p), pairs))
    assert concurrent == [match(*p) for p in pairs]


def test_groups_of_real_answers(rules):
    """Equivalent spellings form one cluster, in order of first appearance."""
    answers = ["1/2", "7", "0.5", "50%", "seven", "8", r"\boxed{\frac12}", "7.0"]
    assert group_equivalent(answers, rules) == [[0, 2, 3, 6], [1, 4, 7], [5]]


def test_groups_compare_with_the_first_member_only(rules):
    """Tolerance is not transitive: 101.6 is within 1 % of 100.8 but not of the cluster's first member 100."""
    assert group_equivalent(["100.0", "100.8", "101.6"], rules) == [[0, 1], [2]]


def test_groups_never_merge_ambiguous_or_empty_answers(rules):
    assert group_equivalent(["cat", "cats", "2007", "2008", "", ""], rules) == [[0], [1], [2], [3], [4], [5]]
    assert group_equivalent([], rules) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([p for pair in flatten(MATCH) for p in pair]), max_size=12))
def test_groups_are_a_partition(answers):
    """Every index occurs once, members and clusters ascend, and members match their cluster's first answer."""
    clusters = group_equivalent(answers, Matcher(RULES_ONLY))
    assert sorted(i for c in clusters for i in c) == list(range(len(answers)))
    assert [c[0] for c in clusters] == sorted(c[0] for c in clusters)
    assert all(c == sorted(c) for c in clusters)
    assert all(match(answers[c[0]], answers[i]).status == "match" for c in clusters for i in c)
