"""Demonstrations of the two trained roles: propose a question, solve a question."""

from __future__ import annotations

from trinity_vlm.environments.microcosm.programs import text
from trinity_vlm.tiny.demonstrations.example import END_OF_THINKING, Demonstration, Subject, json_object
from trinity_vlm.types import CallType


def propose(subject: Subject) -> Demonstration:
    """Look, work a question out, then write it with its answer as one JSON object."""
    program, answer = subject.question()
    candidate = json_object(question=text(program), answer=answer.text)
    completion = subject.trace(answer) + END_OF_THINKING + candidate
    return subject.demonstration(
        CallType.PROPOSE, program, answer.text, case="right", completion=completion, question=""
    )


def solve(subject: Subject) -> Demonstration:
    """Look, work the answer out, then box it."""
    program, answer = subject.question()
    boxed = f"<answer>\\boxed{{{answer.text}}}</answer>"
    completion = subject.trace(answer) + END_OF_THINKING + boxed
    return subject.demonstration(CallType.SOLVE, program, answer.text, case="right", completion=completion)
