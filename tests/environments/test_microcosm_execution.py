"""The executor against scenes worked by hand, every question type of the catalogue."""

from dataclasses import replace

import pytest

from trinity_vlm.environments.microcosm import BASE, ChartScene, Mark, ShapesScene, Thing, execute, parse, text
from trinity_vlm.environments.microcosm.catalogue import QUESTION_TYPES
from trinity_vlm.environments.protocol import Answer, Failure, Ungrounded

#      a            b           c            d
#  1   big red *                small blue o
#  2                small red + big green *
#  4   big blue []                           small green *
SHAPES = ShapesScene(
    (
        Thing("a1", "big", "red", "star"),
        Thing("c1", "small", "blue", "circle"),
        Thing("b2", "small", "red", "cross"),
        Thing("c2", "big", "green", "star"),
        Thing("a4", "big", "blue", "square"),
        Thing("d4", "small", "green", "star"),
    ),
    BASE,
    seed=1,
)
BARS = ChartScene(
    "bar",
    (Mark("B", "red", 40), Mark("D", "blue", 10), Mark("G", "green", 25), Mark("K", "pink", 40)),
    axis_max=50,
    style=BASE,
    seed=2,
)
LINE = ChartScene(
    "point",
    (Mark("C", "red", 2), Mark("E", "blue", 8), Mark("F", "cyan", 5), Mark("M", "pink", 9)),
    axis_max=10,
    style=BASE,
    seed=3,
)

ANSWERS = [
    (SHAPES, "thing_attribute", "What colour is the square?", "blue"),
    (SHAPES, "thing_attribute", "What size is the blue circle?", "small"),
    (SHAPES, "thing_attribute", "What shape is the small red object?", "cross"),
    (SHAPES, "count", "How many stars are there?", "3"),
    (SHAPES, "count", "How many objects are there?", "6"),
    (SHAPES, "count", "How many yellow crosses are there?", "0"),
    (SHAPES, "exist", "Is there a small star?", "yes"),
    (SHAPES, "exist", "Is there a yellow cross?", "no"),
    (SHAPES, "outermost", "What shape is the rightmost object?", "star"),
    (SHAPES, "outermost", "What colour is the topmost star?", "red"),
    (SHAPES, "outermost", "What size is the bottommost star?", "small"),
    (SHAPES, "outermost", "What colour is the leftmost small object?", "red"),
    (SHAPES, "neighbour", "What shape is the object just below the blue circle?", "star"),
    (SHAPES, "neighbour", "What colour is the object just left of the big green star?", "red"),
    (SHAPES, "neighbour", "What size is the object just right of the cross?", "big"),
    (SHAPES, "neighbour", "What size is the object just above the big green object?", "small"),
    (SHAPES, "same", "How many other objects have the same colour as the cross?", "1"),
    (SHAPES, "same", "How many other objects have the same size as the circle?", "2"),
    (SHAPES, "same", "How many other objects have the same shape as the blue square?", "0"),
    (SHAPES, "total", "What is the number of stars plus the number of blue objects?", "5"),
    (SHAPES, "more", "Are there more stars than crosses?", "yes"),
    (SHAPES, "more", "Are there more red objects than blue objects?", "no"),
    (SHAPES, "count_related", "How many stars are right of the cross?", "2"),
    (SHAPES, "count_related", "How many objects are above the square?", "4"),
    (SHAPES, "count_related", "How many blue objects are below the circle?", "1"),
    (SHAPES, "count_related", "How many objects are left of the cross?", "2"),
    (SHAPES, "related_attribute", "What size is the green star below the big green star?", "small"),
    (
        SHAPES,
        "related_arithmetic",
        "What is the number of stars minus the number of red objects left of the circle?",
        "1",
    ),
    (
        SHAPES,
        "related_arithmetic",
        "What is the number of blue objects plus the number of stars above the square?",
        "4",
    ),
    (SHAPES, "related_arithmetic", "What is the number of crosses minus the number of stars above the square?", "-1"),
    (SHAPES, "outermost_related", "What colour is the topmost star right of the cross?", "green"),
    (SHAPES, "outermost_related", "What size is the leftmost object below the circle?", "big"),
    (SHAPES, "more_related", "Are there more stars right of the cross than red objects?", "no"),
    (SHAPES, "more_related", "Are there more stars right of the cross than circles?", "yes"),
    (BARS, "value", "What is the value of bar G?", "25"),
    (LINE, "value", "What is the value of point E?", "8"),
    (BARS, "mark_colour", "What colour is bar K?", "pink"),
    (BARS, "label_of_colour", "Which bar is blue?", "D"),
    (LINE, "label_of_colour", "Which point is cyan?", "F"),
    (BARS, "colour_value", "What is the value of the red bar?", "40"),
    (BARS, "extreme", "Which bar is the lowest?", "D"),
    (LINE, "extreme", "Which point is the highest?", "M"),
    (BARS, "extreme_colour", "What colour is the lowest bar?", "blue"),
    (BARS, "difference", "What is the difference between bar G and bar B?", "15"),
    (BARS, "difference", "What is the difference between bar B and bar G?", "15"),
    (BARS, "sum", "What is the sum of bar D and bar G?", "35"),
    (BARS, "count_beyond", "How many bars are above 10?", "3"),
    (BARS, "count_beyond", "How many bars are below 40?", "2"),
    (BARS, "higher", "Is bar G higher than bar D?", "yes"),
    (BARS, "higher", "Is bar B higher than bar K?", "no"),
    (BARS, "count_beyond_mark", "How many bars are below bar G?", "1"),
    (BARS, "count_beyond_mark", "How many bars are above bar D?", "3"),
    (BARS, "range", "What is the highest bar minus the lowest bar?", "30"),
    (BARS, "colour_sum", "What is the sum of the red bar and the blue bar?", "50"),
    (LINE, "turns", "How many times does the line rise from one point to the next?", "2"),
    (LINE, "turns", "How many times does the line fall from one point to the next?", "1"),
    (BARS, "sum_more", "Is the sum of bar D and bar G more than bar B?", "no"),
    (BARS, "sum_more", "Is the sum of bar B and bar G more than bar K?", "yes"),
    (BARS, "total_beyond", "What is the sum of all bars above 10?", "105"),
    (BARS, "total_beyond", "What is the sum of all bars below 25?", "10"),
    (BARS, "total_beyond", "What is the sum of all bars above 45?", "0"),
    (BARS, "total_beyond_mark", "What is the sum of all bars below bar B?", "35"),
    (BARS, "extreme_arithmetic", "What is the sum of the highest bar and bar D minus bar G?", "25"),
    (LINE, "extreme_arithmetic", "What is the sum of the lowest point and point C minus point M?", "-5"),
    (BARS, "range_more", "Is the highest bar minus the lowest bar more than bar G?", "yes"),
    (BARS, "range_more", "Is the highest bar minus the lowest bar more than bar B?", "no"),
]

FAILURES = [
    (SHAPES, "What colour is the triangle?", Failure.MISSING),
    (SHAPES, "What colour is the star?", Failure.AMBIGUOUS),
    (SHAPES, "What colour is the red star?", Failure.BLIND),
    (SHAPES, "What size is the leftmost object?", Failure.AMBIGUOUS),
    (SHAPES, "What size is the leftmost triangle?", Failure.MISSING),
    (SHAPES, "What colour is the leftmost big object?", Failure.AMBIGUOUS),
    (SHAPES, "What shape is the leftmost star?", Failure.BLIND),
    (SHAPES, "What shape is the object just above the square?", Failure.MISSING),
    (SHAPES, "What shape is the object just right of the small green star?", Failure.MISSING),
    (SHAPES, "How many other objects have the same shape as the star?", Failure.BLIND),
    (SHAPES, "How many other objects have the same shape as the red object?", Failure.AMBIGUOUS),
    (SHAPES, "How many stars are above the pink cross?", Failure.MISSING),
    (SHAPES, "How many crosses are above the green star?", Failure.AMBIGUOUS),
    (SHAPES, "How many red crosses are above the cross?", Failure.BLIND),
    (SHAPES, "Are there more red stars than stars?", Failure.BLIND),
    (SHAPES, "Are there more red stars above the square than stars?", Failure.BLIND),
    (SHAPES, "What size is the star above the square?", Failure.AMBIGUOUS),
    (SHAPES, "What size is the circle below the square?", Failure.MISSING),
    (SHAPES, "What is the value of bar G?", Failure.OTHER_DOMAIN),
    (SHAPES, "How many times does the line rise from one point to the next?", Failure.OTHER_DOMAIN),
    (BARS, "Which bar is the highest?", Failure.AMBIGUOUS),
    (BARS, "What is the value of bar P?", Failure.MISSING),
    (BARS, "Which bar is cyan?", Failure.MISSING),
    (BARS, "What is the difference between bar B and bar B?", Failure.BLIND),
    (BARS, "Is bar B higher than bar B?", Failure.BLIND),
    (BARS, "Is the sum of bar B and bar G more than bar G?", Failure.BLIND),
    (BARS, "How many bars are above 100?", Failure.BLIND),
    (BARS, "What is the sum of all bars below 1?", Failure.BLIND),
    (BARS, "What is the value of point G?", Failure.OTHER_DOMAIN),
    (BARS, "How many stars are there?", Failure.OTHER_DOMAIN),
    (LINE, "What is the value of bar E?", Failure.OTHER_DOMAIN),
    (LINE, "How many objects are there?", Failure.OTHER_DOMAIN),
]


def question_id(case):
    return case if isinstance(case, str) else None


@pytest.mark.parametrize(("scene", "kind", "question", "expected"), ANSWERS, ids=question_id)
def test_hand_worked_answer(scene, kind, question, expected):
    """Each question is read as its type and has the answer worked out by hand."""
    program = parse(question)
    assert program is not None
    assert program.type == kind
    outcome = execute(scene, program)
    assert isinstance(outcome, Answer)
    assert outcome.text == expected


def test_every_type_is_hand_worked():
    """No row of the catalogue lacks a hand-worked answer."""
    assert {kind for _, kind, _, _ in ANSWERS} == set(QUESTION_TYPES)
    assert len(QUESTION_TYPES) >= 24


@pytest.mark.parametrize(("scene", "question", "reason"), FAILURES, ids=question_id)
def test_failed_premise(scene, question, reason):
    """Missing, ambiguous and foreign referents and blind questions have no answer, and say why."""
    program = parse(question)
    assert program is not None
    outcome = execute(scene, program)
    assert isinstance(outcome, Ungrounded)
    assert outcome.reason is reason
    assert outcome.trace


TRACES = [
    (SHAPES, "Are there more stars right of the cross than circles?", "cross: b2; star right of b2: c2 d4 = 2; "
     "circle: c1 = 1; 2 > 1 so yes"),
    (SHAPES, "What size is the leftmost object below the circle?", "circle: c1; object below c1: b2 c2 a4 d4; "
     "leftmost: a4; a4 is big"),
    (SHAPES, "What colour is the star?", "star: a1 c2 d4; not unique"),
    (SHAPES, "Is there a yellow cross?", "yellow cross: none so no"),
    (SHAPES, "What is the value of bar G?", "no bars"),
    (BARS, "What is the sum of all bars above 10?", "above 10: B G K; 40 + 25 = 65; 65 + 40 = 105"),
    (BARS, "What is the difference between bar G and bar B?", "G is 25; B is 40; 40 - 25 = 15"),
    (BARS, "Which bar is the highest?", "highest 40: B K; not unique"),
    (BARS, "What is the value of bar P?", "P: none; missing"),
    (LINE, "How many times does the line rise from one point to the next?", "rise to: E M = 2"),
]  # fmt: skip


@pytest.mark.parametrize(("scene", "question", "expected"), TRACES, ids=question_id)
def test_trace_wording(scene, question, expected):
    """Traces name what was found step by step in fixed wording; a failed one ends with the failure."""
    program = parse(question)
    assert program is not None
    assert "; ".join(execute(scene, program).trace) == expected


MIRRORED = {"left of": "right of", "right of": "left of", "leftmost": "rightmost", "rightmost": "leftmost"}


@pytest.mark.parametrize("question", [question for scene, _, question, _ in ANSWERS if scene is SHAPES])
def test_mirrored_scene_answers_mirrored_question(question):
    """Swapping left and right in scene and question changes no answer: relations are symmetrical."""
    columns = dict(zip("abcd", "dcba", strict=True))
    things = tuple(replace(thing, cell=columns[thing.cell[0]] + thing.cell[1]) for thing in SHAPES.things)
    program = parse(question)
    assert program is not None
    mirrored = replace(program, slots=tuple(MIRRORED.get(slot, slot) for slot in program.slots))
    assert text(mirrored) != question or not set(MIRRORED) & set(program.slots)
    assert execute(replace(SHAPES, things=things), mirrored).text == execute(SHAPES, program).text
