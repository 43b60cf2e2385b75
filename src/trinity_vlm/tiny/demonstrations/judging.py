"""Demonstrations of the two judgements of Solver work: the reasoning score and the dispute."""

from __future__ import annotations

import re
from random import Random

from trinity_vlm.environments.microcosm.perturb import misread, misread_answer, neighbouring_answer
from trinity_vlm.environments.microcosm.programs import Program, evaluate
from trinity_vlm.environments.microcosm.scenes import ChartScene, Scene, listing
from trinity_vlm.environments.protocol import Answer
from trinity_vlm.tiny.demonstrations.example import (
    END_OF_THINKING,
    Demonstration,
    Subject,
    full_trace,
    json_object,
    steps_of,
)
from trinity_vlm.tiny.demonstrations.policy import glance
from trinity_vlm.types import CallType

REASONING_CASES: tuple[tuple[str, float, float], ...] = (
    ("explicit", 0.34, 1.0),
    ("listing_skipped", 0.07, 0.5),
    ("steps_skipped", 0.11, 0.5),
    ("misread", 0.26, 0.25),
    ("wrong_step", 0.1, 0.25),
    ("none", 0.12, 0.0),
)
"""(case, weight, score): the reasoning rubric of Appendix F."""
_FINDINGS = {
    "explicit": "all shown",
    "listing_skipped": "listing skipped",
    "steps_skipped": "steps skipped",
    "wrong_step": "wrong step",
    "none": "no reasoning",
}
DISPUTE_MAJORITY_RIGHT = 0.5
DISPUTE_GLANCED = 0.25
"""How often the majority's supporting trace is no more than an answer."""


def reason(subject: Subject) -> Demonstration:
    """Score a thinking block: each thing in the image and whether the block has it so, the right steps, the finding."""
    names, weights, scores = zip(*REASONING_CASES, strict=True)
    case, score = subject.rng.choices(list(zip(names, scores, strict=True)), weights)[0]
    program, answer = subject.question()
    shown, finding = _shown_reasoning(subject, program, answer, case)
    seen = listing(subject.scene)
    if case not in ("listing_skipped", "none"):
        seen = compared(seen, shown.partition(". ")[0])
    completion = json_object(justification=f"{seen}. {steps_of(answer)}. {finding}", reasoning_score=score)
    return subject.demonstration(
        CallType.REASON, program, answer.text, case=case, completion=completion, reasoning=shown
    )


def dispute(subject: Subject) -> Demonstration:
    """Settle reference against majority: solve the question, put the two answers beside the own one, then rule."""
    rng = subject.rng
    program, answer, misread_scene, wrong = _disputed(subject)
    majority_right = rng.random() < DISPUTE_MAJORITY_RIGHT
    if majority_right:
        winner, reference, majority, support = "majority", wrong.text, answer.text, subject.trace(answer)
    else:
        winner, reference, majority, support = "ref", answer.text, wrong.text, full_trace(misread_scene, wrong)
    if rng.random() < DISPUTE_GLANCED:
        support = glance(majority)
    finding = f"ref {reference}, majority {majority}, answer {answer.text}: {winner}"
    ruling = json_object(correct_answer=winner, justification=f"answer {answer.text}")
    return subject.demonstration(
        CallType.DISPUTE,
        program,
        answer.text,
        case=f"{winner}_right",
        completion=f"{subject.trace(answer)}. {finding}" + END_OF_THINKING + ruling,
        answer=reference,
        majority_answer=majority,
        reasoning=support,
    )


def _disputed(subject: Subject) -> tuple[Program, Answer, Scene, Answer]:
    """A question with its answer, and a misreading of the scene with the other answer it leads to."""
    while True:
        program, answer = subject.question()
        read = misread_answer(subject.rng, subject.scene, program)
        if read is not None:
            return program, answer, *read


def _shown_reasoning(subject: Subject, program: Program, answer: Answer, case: str) -> tuple[str, str]:
    """The thinking block to be scored and what is to be found in it."""
    scene, rng = subject.scene, subject.rng
    if case == "misread":
        return _misread_reasoning(rng, scene, program)
    shown = {
        "explicit": subject.trace(answer),
        "listing_skipped": steps_of(answer),
        "steps_skipped": f"{listing(scene)}. answer {answer.text}",
        "none": rng.choice(("", "just a guess", glance(answer.text), glance(_other_answer(subject, program, answer)))),
    }
    if case == "wrong_step":
        shown[case] = f"{listing(scene)}. {_wrong_steps(subject, answer)}"
    return shown[case], _FINDINGS[case]


def _other_answer(subject: Subject, program: Program, answer: Answer) -> str:
    read = misread_answer(subject.rng, subject.scene, program)
    return read[1].text if read else neighbouring_answer(subject.rng, subject.scene, answer.text)


def _misread_reasoning(rng: Random, scene: Scene, program: Program) -> tuple[str, str]:
    """Steps that follow from one or two items read wrongly."""
    while True:
        read = misread(rng, scene, rng.choice((1, 1, 2)))
        outcome = evaluate(read, program)
        if isinstance(outcome, Answer) and read != scene:
            return full_trace(read, outcome), f"misread {' '.join(misread_names(scene, read))}"


def compared(true_listing: str, shown_listing: str) -> str:
    """The true listing with ``ok`` or ``no`` behind each item: ``a1 big red star ok, c2 small blue cross no``.

    A small model can check the item it has just written, but not a whole listing at once.
    """
    shown = set(shown_listing.split(", "))
    return ", ".join(f"{item} {'ok' if item in shown else 'no'}" for item in true_listing.split(", "))


def misread_names(scene: Scene, read: Scene) -> list[str]:
    """Cells or labels at which two scenes differ, in scene order."""
    true_items, read_items = (
        {mark.label: mark for mark in s.marks}
        if isinstance(s, ChartScene)
        else {thing.cell: thing for thing in s.things}
        for s in (scene, read)
    )
    return sorted(name for name in {*true_items, *read_items} if true_items.get(name) != read_items.get(name))


def _wrong_steps(subject: Subject, answer: Answer) -> str:
    """Steps with one wrong result, or the steps of another question about the same scene."""
    results = [i for i, line in enumerate(answer.trace) if re.search(r"= -?\d+$", line)]
    if results and subject.rng.random() < 0.7:
        lines = list(answer.trace)
        position = subject.rng.choice(results)
        head, _, number = lines[position].rpartition("= ")
        lines[position] = f"{head}= {neighbouring_answer(subject.rng, subject.scene, number.lstrip('-'))}"
        return "; ".join(lines)
    while True:
        _, other = subject.question()
        if not set(answer.trace) <= set(other.trace):
            return steps_of(other)
