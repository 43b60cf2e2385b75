"""Question text, its parser, and when two answers mean the same."""

from random import Random

import pytest

from trinity_vlm.environments.microcosm import Microcosm, execute, parse, text
from trinity_vlm.environments.microcosm.answers import canonical, same_answer
from trinity_vlm.environments.microcosm.catalogue import QUESTION_TYPES
from trinity_vlm.environments.microcosm.sampler import draw_program, types_for

WORLD = Microcosm()


def sampled_programs(count: int, seed: int = 0):
    rng = Random(seed)
    for index in range(count):
        scene = WORLD.scene("train", index)
        yield scene, draw_program(rng, scene, rng.choice(types_for(scene)), careful=index % 2 == 0)


def test_parse_inverts_text():
    """Thousands of questions of every type, grounded or not, read back to the very same program."""
    seen = set()
    for _, program in sampled_programs(4000):
        assert parse(text(program)) == program
        seen.add(program.type)
    assert seen == set(QUESTION_TYPES)


VARIANTS = {
    "upper case": str.upper,
    "lower case": str.lower,
    "no question mark": lambda q: q.removesuffix("?"),
    "full stop": lambda q: q.removesuffix("?") + " .",
    "spaces": lambda q: "  " + q.replace(" ", "   ") + " \n",
    "no articles": lambda q: q.replace(" the ", " ").replace(" a ", " "),
    "more articles": lambda q: q.replace("How many ", "How many the "),
    "american": lambda q: q.replace("colour", "color"),
    "several marks": lambda q: q + "??",
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_parse_sees_through_small_differences(variant):
    """Case, articles, spacing, closing punctuation and American spelling don't change what a question means."""
    for _, program in sampled_programs(400, seed=1):
        assert parse(variant(text(program))) == program


@pytest.mark.parametrize(
    "question",
    [
        "",
        "?",
        "What is this?",
        "What colour is the dog?",
        "How many star are there?",
        "How many stars are there in the image?",
        "Is there a stars?",
        "What is the value of bar A?",
        "What is the value of bar BB?",
        "What is the difference between bar B and point C?",
        "How many bars are above 1000?",
        "What colour is the small big star?",
        "What colour is the star red?",
        "What is the value of bar B? What is the value of bar B?",
    ],
)
def test_parse_refuses_other_text(question):
    """Whatever the catalogue can't word is None, never a near miss."""
    assert parse(question) is None


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("2", "2"),
        ("two", "2"),
        ("Two.", "2"),
        ("2.0", "2"),
        ("2 stars", "2"),
        ("3 crosses", "3"),
        ("4 bars", "4"),
        ("two objects", "2"),
        ("none", "0"),
        ("bar C", "C"),
        ("the point C", "C"),
        ("c", "C"),
        ("stars", "star"),
        ("a cross", "cross"),
        ("crosses", "cross"),
        ("large", "big"),
        ("Red", "red"),
        ("the colour red", "red"),
        ("gray", "grey"),
        (" Yes. ", "yes"),
        ("the", "the"),
    ],
)
def test_same_answer(given, truth):
    """Other forms of one answer are the same answer, in both directions."""
    assert same_answer(given, truth)
    assert same_answer(truth, given)


@pytest.mark.parametrize(
    ("given", "truth"),
    [("3", "2"), ("20", "2"), ("-2", "2"), ("2 or 3", "2"), ("bar D", "C"), ("red", "blue"), ("", "0"), ("no", "0"),
     ("unknown", "yes"), ("2.5", "2"), ("red star", "red"), ("bar", "C"), ("10.0", "1")],
)  # fmt: skip
def test_different_answers(given, truth):
    """Near values, hedges and other words are different answers."""
    assert not same_answer(given, truth)
    assert not same_answer(truth, given)


def test_distinct_answers_stay_distinct():
    """Canonical spelling merges no two different executor answers."""
    answers = {getattr(execute(scene, program), "text", None) for scene, program in sampled_programs(3000)} - {None}
    assert len({canonical(answer) for answer in answers}) == len(answers) > 60


@pytest.mark.parametrize(("proposed", "right"), [("3", True), ("three", True), ("3 stars", True), ("2", False)])
def test_judge_grounded(proposed, right):
    """Judging a grounded question gives the executor's answer and compares the proposed one with it."""
    scene = next(s for s in (WORLD.scene("train", i) for i in range(999)) if _stars(s) == 3)
    judgement = WORLD.judge(scene, "how many stars are there", proposed)
    assert (judgement.parsable, judgement.grounded, judgement.answer) == (True, True, "3")
    assert judgement.right is right


def test_judge_without_ground_or_grammar():
    """Ungrounded and unreadable questions are never right, whatever the answer."""
    scene = next(s for s in (WORLD.scene("train", i) for i in range(99)) if _stars(s) is not None)
    foreign = WORLD.judge(scene, "Which bar is the highest?", "B")
    assert (foreign.parsable, foreign.grounded, foreign.right, foreign.answer) == (True, False, False, None)
    unreadable = WORLD.judge(scene, "Why?", "0")
    assert (unreadable.parsable, unreadable.grounded, unreadable.right, unreadable.answer) == (
        False,
        False,
        False,
        None,
    )


def _stars(scene):
    return sum(thing.shape == "star" for thing in scene.things) if hasattr(scene, "things") else None
