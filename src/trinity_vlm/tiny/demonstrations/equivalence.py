"""Demonstrations of answer equivalence, text only: pairs that spelling rules leave open."""

from __future__ import annotations

from trinity_vlm.environments.microcosm.answers import same_answer
from trinity_vlm.environments.microcosm.perturb import neighbouring_answer
from trinity_vlm.environments.microcosm.programs import Program
from trinity_vlm.tiny.demonstrations.example import Demonstration, Subject, json_object
from trinity_vlm.tiny.demonstrations.variants import hedge, same_in_other_words
from trinity_vlm.types import CallType

EQUIVALENCE_CASES: tuple[tuple[str, float], ...] = (
    ("same", 0.44),
    ("different", 0.2),
    ("different_reworded", 0.2),
    ("hedged", 0.06),
    ("loose", 0.1),
)
LOOSE_QUESTIONS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("What colour is the background?", (("grey", "gray", "the colour gray"), ("white", "white colour"), ("black",))),
    ("On which side is the star?", (("left", "left side", "on the left"), ("right", "the right side", "on the right"))),
    ("Does the line go up or down?", (("up", "up."), ("down", "Down"))),
)
"""Questions outside the microcosm, each with groups of answers; answers of one group mean the same."""


def equivalence(subject: Subject) -> Demonstration:
    """Does the prediction mean the reference? ``{"match": 0}`` or ``{"match": 1}``."""
    names, weights = zip(*EQUIVALENCE_CASES, strict=True)
    case: str = subject.rng.choices(names, weights)[0]
    if case == "loose":
        return _loose(subject)
    program, answer = subject.question()
    pair = [answer.text, _prediction(subject, program, answer.text, case)]
    if subject.rng.random() < 0.3:
        pair.reverse()
    reference, prediction = pair
    completion = json_object(match=int(case == "same"))
    return subject.demonstration(
        CallType.EQUIVALENCE,
        program,
        answer.text,
        case=case,
        completion=completion,
        answer=reference,
        prediction=prediction,
    )


def _prediction(subject: Subject, program: Program, answer: str, case: str) -> str:
    if case == "same":
        return same_in_other_words(subject.rng, answer, program)
    if case == "hedged":
        return hedge(subject.rng, subject.scene, answer)
    wrong = neighbouring_answer(subject.rng, subject.scene, answer)
    return wrong if case == "different" else same_in_other_words(subject.rng, wrong, program)


def _loose(subject: Subject) -> Demonstration:
    question, groups = subject.rng.choice(LOOSE_QUESTIONS)
    reference = subject.rng.choice(subject.rng.choice(groups))
    prediction = subject.rng.choice([word for group in groups for word in group if word != reference])
    completion = json_object(match=int(same_answer(prediction, reference)))
    return Demonstration(
        CallType.EQUIVALENCE,
        subject.uid,
        None,
        question,
        completion,
        case="loose",
        answer=reference,
        prediction=prediction,
    )
