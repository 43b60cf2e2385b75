"""The labelled table: no hard error on any pair, and the status that the rules promise on each."""

import itertools

import pytest
from answer_pairs import AMBIGUOUS, MATCH, MISMATCH, NEEDS_ALGEBRA, flatten

from trinity_vlm.answers import match

TABLES = [("match", MATCH), ("mismatch", MISMATCH), ("ambiguous", AMBIGUOUS)]
GROUPS = [(status, name) for status, table in TABLES for name in table]


@pytest.mark.parametrize(("status", "name"), GROUPS, ids=[f"{s}: {n}" for s, n in GROUPS])
def test_status_of_every_labelled_pair(status, name):
    """Each pair of the table gets its label; this bounds hard errors, soft errors and overreach at zero here."""
    pairs = dict(TABLES)[status][name]
    wrong = [(ref, pred, match(ref, pred)) for ref, pred in pairs if match(ref, pred).status != status]
    assert wrong == []


# The tolerance is a share of the reference, so these, at its edge, may change when swapped.
EDGE = {("0", "1e-10"), ("1e-10", "0"), ("0.33", "1/3")}


@pytest.mark.parametrize(("status", "table"), TABLES, ids=[s for s, _ in TABLES])
def test_swapped_pairs_are_no_hard_errors(status, table):
    """With prediction and reference exchanged the label may soften to ambiguous (tolerance base), never flip."""
    opposite = {"match": "mismatch", "mismatch": "match", "ambiguous": "-"}[status]
    pairs = [pair for pair in flatten(table) if pair not in EDGE]
    assert [(a, b) for a, b in pairs if match(b, a).status == opposite] == []


def test_swapped_ambiguous_pairs_never_match():
    """Nothing that must not match does so the other way round."""
    pairs = [pair for pair in flatten(AMBIGUOUS) if pair not in EDGE]
    assert [(a, b) for a, b in pairs if match(b, a).status == "match"] == []


def test_the_table_is_large_and_free_of_contradictions():
    """At least 200 pairs, each labelled once."""
    pairs = [pair for _, table in TABLES for pair in flatten(table)]
    assert len(pairs) >= 900
    assert len(set(pairs)) == len(pairs)


def test_every_answer_matches_itself_with_space_around():
    """Reflexive on all real answers of the table, blanks at the ends ignored."""
    answers = set(itertools.chain.from_iterable(pair for _, table in TABLES for pair in flatten(table)))
    assert [a for a in answers if match(a, a).status != "match" or match(a, f" {a}\n").status != "match"] == []


def test_tier_follows_status():
    """Tier 1 decides matches, tier 2 mismatches, tier 3 leaves it open (A.3)."""
    tiers = {"match": 1, "mismatch": 2, "ambiguous": 3}
    results = [match(*pair) for _, table in TABLES for pair in flatten(table)]
    assert all(r.tier == tiers[r.status] and r.rule for r in results)


def test_algebra_needs_a_comparer_and_only_its_yes_counts():
    """Without a comparer, or when it says no or nothing, algebra stays ambiguous; yes is a tier-1 match."""
    for ref, pred in NEEDS_ALGEBRA:
        assert match(ref, pred, symbolic=lambda a, b: None).status == "ambiguous"
        assert match(ref, pred, symbolic=lambda a, b: False).status == "ambiguous"
        result = match(ref, pred, symbolic=lambda a, b: True)
        assert (result.status, result.tier) == ("match", 1)


def test_words_and_lookalikes_never_reach_the_symbolic_step():
    """A comparer that says yes to everything makes no other pair match: words, ranges, dates and sizes stay away."""
    reached = []

    def yes(ref, pred):
        reached.append((ref, pred))
        return True

    pairs = [p for p in flatten(AMBIGUOUS) if p not in NEEDS_ALGEBRA]
    for pair in pairs:
        match(*pair, symbolic=yes)
    forbidden = ("apple", "cat", "-20", "2020", "AB", "or", "E.", "A-B", "4th", "N2")
    assert [pair for pair in reached if any(text in side for side in pair for text in forbidden)] == []
    assert len(reached) <= 0.12 * len(pairs)
