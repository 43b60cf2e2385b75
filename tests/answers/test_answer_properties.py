"""Properties over random text: reflexive, symmetric, total, fast, and empty predictions are wrong."""

import random
import time
from itertools import pairwise

import pytest
from answer_pairs import AMBIGUOUS, MATCH, MISMATCH, flatten
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trinity_vlm.answers import match
from trinity_vlm.answers.normalise import MAX_ANSWER_CHARS

PIECES = [
    "\\frac", "{", "}", "(", ")", "[", "]", "1", "2", "10", ".", ",", " ", "^", "_", "\\", "$", "%", "x", "-", "+",
    "*", "/", "=", ":", "pi",
    "sqrt", "\\text", "\\boxed{", "½", "²", "₂", "cm", "m/s", "°", "and", "to", "two", "third", "A", "B", "~", "|",
    "e", "1e9", "\u2009", "!",
    "\\sqrt[", "π", "Ω", "\\left", "'", '"', ";", "million", "\n", "a", "the", "±", "x 10^", "\\,", "&", "#", "：",
    "、", "９", "\x00",
]  # fmt: skip
ANSWERS = [side for table in (MATCH, MISMATCH, AMBIGUOUS) for pair in flatten(table) for side in pair]
random_text = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.sampled_from(ANSWERS)
)


@settings(max_examples=300, deadline=None)
@given(random_text.filter(str.strip))
def test_reflexive(text):
    assert match(text, text).status == "match"


@settings(max_examples=500, deadline=None)
@given(random_text, random_text)
def test_symmetric_without_tolerance(left, right):
    """With rel = 0 only the absolute floor of a zero reference tells the sides apart."""
    assume(not (match("0", left).status == match("0", right).status == "match"))
    assert match(left, right, rel=0.0).status == match(right, left, rel=0.0).status


@settings(max_examples=300, deadline=None)
@given(random_text, random_text)
def test_never_flips_when_swapped(left, right):
    """With a tolerance the base changes, so a status may soften, but match and mismatch never trade places."""
    statuses = {match(left, right).status, match(right, left).status}
    assert statuses != {"match", "mismatch"} or _both_numbers_near_the_edge(left, right)


def _both_numbers_near_the_edge(left, right):
    return match(left, right, rel=0.0102).status == match(right, left, rel=0.0102).status == "match"


@given(random_text, st.sampled_from(["", " ", "\n\t", "\u3000", "\xa0"]))
def test_empty_prediction_is_a_mismatch(ref, blank):
    assert match(ref, blank).status == "mismatch"
    assert match(blank, ref).status == "mismatch"


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=1e-3, max_value=1e15))
def test_floats_match_their_own_spellings(value):
    """repr, exponent and percent spellings of one number agree."""
    assert match(repr(value), f"{value:.17e}").status == "match"
    assert match(f"{value:.12f}", f"{value * 100:.12f}%").status in ("match", "ambiguous")


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 1000))
def test_fractions_match_their_latex(top, bottom):
    sign, size = ("-" if top < 0 else ""), abs(top)
    assert match(f"{top}/{bottom}", rf"{sign}\frac{{{size}}}{{{bottom}}}").status == "match"


@pytest.mark.parametrize(
    ("options", "count"), [(None, 10_000), (["1 cm", "2 cm", "x^2", "blue"], 1_000)], ids=["plain", "with options"]
)
def test_ten_thousand_random_strings_are_fast(options, count):
    """No string raises, and the mean stays far under 5 ms; the slowest allows for a busy machine."""
    generator = random.Random(0)
    texts = ["".join(generator.choices(PIECES, k=generator.randint(1, 20))) for _ in range(count)]
    durations = []
    for ref, pred in pairwise(texts):
        start = time.process_time()
        match(ref, pred, options=options)
        durations.append(time.process_time() - start)
    assert sum(durations) / len(durations) < 0.005
    assert sorted(durations)[int(0.999 * len(durations))] < 0.05


@pytest.mark.parametrize(
    "unit",
    [
        "{", "}", "\\boxed{", "(", "((1,", "^", "\\frac", "\\sqrt{", "1,", "1/", "9", "-", "1 ", "a ", "one ",
        "sqrt(", "A, ",
        "$", "\\", "½", "m/", "x^2+", "2^", "*", "1:", "'", "(A) ", "\\text{", "10^", "+1", "and ", "~", ".", "{1,",
        "a-", "&",
        "°", "kg m ", "√", "\\pi", "_", "A. ", "in cm ", "1 000 ", "x x ",
    ],
)  # fmt: skip
def test_repetitive_text_of_the_greatest_length_is_fast(unit):
    """No pattern of the parsers blows up on repetition."""
    text = (unit * MAX_ANSWER_CHARS)[: MAX_ANSWER_CHARS - 1]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        match(text, text[:-1] + "7", options=["5 cm", text[:300]], question=text)
        seconds.append(time.process_time() - start)
        if seconds[-1] < 0.5:
            break
    assert min(seconds) < 0.5


@pytest.mark.parametrize("unit", ["a", "\\boxed{", "9", "{ ", "(1,"])
def test_megabytes_are_cut_off_early(unit):
    """A runaway completion costs microseconds and is never a match by its prefix."""
    long = unit * (2_000_000 // len(unit))
    start = time.process_time()
    assert match("5", long).status == "ambiguous"
    assert match(long, "5").status == "ambiguous"
    assert match(long, long + "b").status == "ambiguous"
    assert match(long, long).status == "match"
    assert match("5", "6", question=long, options=[long, "5"]).status in ("ambiguous", "mismatch")
    assert time.process_time() - start < 5, "0.1 s is usual; a pattern that blows up takes minutes"
