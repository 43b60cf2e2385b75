"""What the question settles: units of bare numbers, clock times, scores, scales and percentages."""

import pytest

from trinity_vlm.answers import match

CM = "What is the length in cm?"


@pytest.mark.parametrize(
    ("ref", "pred", "question", "status"),
    [
        ("50", "0.5 m", CM, "match"),
        ("50", "50 cm", CM, "match"),
        ("50", "50 m", CM, "ambiguous"),
        ("50", "20 m", CM, "mismatch"),
        ("50", "0.5 m", None, "ambiguous"),
        ("50", "0.5 m", "A 3 m board is cut; how long is each part in cm or in km?", "ambiguous"),
        ("90", "1.5 hours", "How many minutes does it take?", "match"),
        ("3:30", "7:60", "What time does the clock show?", "ambiguous"),
        ("10:30", "1:3", "What time does the clock show?", "ambiguous"),
        ("3:2", "6:4", "What was the final score?", "ambiguous"),
        ("3:2", "6:4", None, "match"),
        ("3 to 5", "6 to 10", "What is the ratio of cats to dogs?", "match"),
        ("3 to 5", "6 to 10", None, "ambiguous"),
        ("5", "5,000,000", "Population in millions?", "ambiguous"),
        ("5", "5,000,000", None, "mismatch"),
        ("5", "0.05", "What percentage is blue?", "ambiguous"),
        ("5", "0.05", None, "mismatch"),
    ],
)
def test_question(ref, pred, question, status):
    assert match(ref, pred, question=question).status == status
