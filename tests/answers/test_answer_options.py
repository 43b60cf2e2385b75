"""Multiple choice: letters, sets of letters and option texts name the same options."""

import pytest

from trinity_vlm.answers import match
from trinity_vlm.answers.options import options_of_question

LENGTHS = ["10 cm", "12 cm", "15 cm", "20 cm"]
PLANETS = ["Mercury", "Venus", "Both Mercury and Venus", "None of the above"]
QUESTION = "Which colour is the roof?\nA. red\nB. blue\nC. green"


@pytest.mark.parametrize(
    ("ref", "pred"),
    [
        ("B", "12 cm"), ("12 cm", "B"), ("B", "0.12 m"), ("B", "B. 12 cm"), ("B", "(b)"), ("B", "Option B: 12 cm"),
        ("B", "12"),
        ("BD", "DB"), ("BCD", "B, C and D"), ("BD", "B、D"), ("BD", "D and B"), ("B", r"\boxed{\text{B}}"),
        ("B", "option b"),
    ],
)  # fmt: skip
def test_same_options(ref, pred):
    assert match(ref, pred, options=LENGTHS).status == "match"


@pytest.mark.parametrize(
    ("ref", "pred"), [("B", "C"), ("B", "15 cm"), ("B", "13 cm"), ("BCD", "BC"), ("BD", "B"), ("10 cm", "D")]
)
def test_different_options_are_a_mismatch(ref, pred):
    """Both sides name options, or one names none of the numbers offered: no model is asked."""
    assert match(ref, pred, options=LENGTHS).status == "mismatch"


@pytest.mark.parametrize(
    "pred", ["E", "B. 15 cm", "A or B", "A or B or C", "A careful look", "Bravo", "the second option", "BB", "B?C"]
)
def test_no_single_choice_is_ambiguous(pred):
    """Hedged, contradictory, out-of-range and prose answers name no option; a bare capital in prose is never read."""
    assert match("B", pred, options=LENGTHS).status == "ambiguous"


def test_option_texts():
    assert match("C", "both Mercury and Venus", options=PLANETS).status == "match"
    assert match("Venus", "B", options=PLANETS).status == "match"
    assert match("B", "Mercury", options=PLANETS).status == "mismatch"
    assert match("B", "the second planet", options=PLANETS).status == "ambiguous"


def test_close_numbers_among_options_are_told_apart():
    """Options within the tolerance of each other are different choices."""
    assert match("10.00", "10.05", options=["10.00", "10.05", "10.10"]).status == "mismatch"
    assert match("A", "10.05", options=["10.00", "10.05", "10.10"]).status == "mismatch"


def test_options_that_are_letters_themselves_are_not_guessed():
    """The answer B could be option B or the option whose text is B."""
    assert match("A", "B", options=["B", "A", "D", "C"]).status == "ambiguous"


@pytest.mark.parametrize(
    "question", [QUESTION, "Which colour? (A) red (B) blue (C) green", "Colour?\n(A) red\n(B) blue\n(C) green"]
)
def test_options_listed_in_the_question(question):
    assert options_of_question(question) == ("red", "blue", "green")
    assert match("B", "blue", question=question).status == "match"
    assert match("blue", "C", question=question).status == "mismatch"


@pytest.mark.parametrize(
    "question", ["What is shown in panel A. Why?", "Which is longer, A or B?", "C. elegans has how many cells?"]
)
def test_questions_without_options(question):
    assert options_of_question(question) == ()


def test_letters_without_options_keep_their_order():
    """A, B, C may be a ranking, and AC a segment, so only the same order in the same spelling agrees."""
    assert match("A, C", "A and C").status == "match"
    assert match("A, C", "C, A").status == "ambiguous"
    assert match("AC", "A, C").status == "ambiguous"
