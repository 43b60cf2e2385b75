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
from trinity_vlm.types import CallType

REASONING_CASES: tuple[tuple[str, float, float], ...] = (
    ("explicit", 0.38, 1.0),
    ("listing_skipped", 0.09, 0.5),
    ("steps_skipped", 0.13, 0.5),
    ("misread", 0.22, 0.25),
    ("wrong_step", 0.1, 0.25),
    ("none", 0.08, 0.0),
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


def reason(subject: Subject) -> Demonstration:
    """Score a thinking block: what the image shows and the right steps, the finding, then the score."""
    names, weights, scores = zip(*REASONING_CASES, strict=True)
    case, score = subject.rng.choices(list(zip(names, scores, strict=True)), weights)[0]
    program, answer = subject.question()
    shown, finding = _shown_reasoning(subject, program, answer, case)
    if case in ("explicit", "misread", "wrong_step", "steps_skipped"):
        finding = f"{compared(listing(subject.scene), shown.partition('. ')[0])}. {finding}"
    completion = json_object(justification=f"{subject.trace(answer)}. {finding}", reasoning_score=score)
    return subject.demonstration(
        CallType.REASON, program, answer.text, case=case, completion=completion, reasoning=shown
    )


def dispute(subject: Subject) -> Demonstration:
    """Settle reference against majority: solve the question first, then say whose answer it is and rule so."""
    program, answer, misread_scene, wrong = _disputed(subject)
    majority_right = subject.rng.random() < DISPUTE_MAJORITY_RIGHT
    if majority_right:
        reference, majority, support = wrong.text, answer.text, subject.trace(answer)
    else:
        reference, majority, support = answer.text, wrong.text, full_trace(misread_scene, wrong)
    winner = "majority" if majority_right else "ref"
    ruling = json_object(correct_answer=winner, justification=f"answer {answer.text}")
    return subject.demonstration(
        CallType.DISPUTE,
        program,
        answer.text,
        case=f"{winner}_right",
        completion=f"{subject.trace(answer)}. answer {answer.text}: {winner}" + END_OF_THINKING + ruling,
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
        "none": rng.choice(("", answer.text, f"answer {answer.text}", f"it looks like {answer.text}", "just a guess")),
    }
    if case == "wrong_step":
        shown[case] = f"{listing(scene)}. {_wrong_steps(subject, answer)}"
    return shown[case], _FINDINGS[case]


def _misread_reasoning(rng: Random, scene: Scene, program: Program) -> tuple[str, str]:
    """Steps that follow from one or two items read wrongly."""
    while True:
        read = misread(rng, scene, rng.choice((1, 1, 2)))
        outcome = evaluate(read, program)
        if isinstance(outcome, Answer) and read != scene:
            return full_trace(read, outcome), f"misread {' '.join(misread_names(scene, read))}"


def compared(true_listing: str, shown_listing: str) -> str:
    """Item by item in scene order whether the shown listing has it as it is: ``a1 ok c2 no``; invented items count too.

    The comparison is written out because a small model can check one item at a time, but not a whole listing at once.
    """
    true_items, shown_items = (
        {item.partition(" ")[0]: item for item in text.split(", ")} for text in (true_listing, shown_listing)
    )
    names = sorted({*true_items, *shown_items}, key=lambda name: name[::-1])
    return " ".join(f"{name} {'ok' if true_items.get(name) == shown_items.get(name) else 'no'}" for name in names)


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
