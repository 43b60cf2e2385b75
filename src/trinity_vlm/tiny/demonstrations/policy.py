"""Demonstrations of the two trained roles: propose a question, solve a question.

Solving is shown in two habits, as a pretrained model has more than one: ``looked`` lists what the image shows and works
the answer out, ``glanced`` only states it. Both give the right answer here, so nothing in the warm-up prefers looking;
that it pays is left for the loop to find out.
"""

from __future__ import annotations

from collections.abc import Mapping

from trinity_vlm.environments.microcosm.programs import text
from trinity_vlm.tiny.demonstrations.example import END_OF_THINKING, Demonstration, Subject, json_object
from trinity_vlm.types import CallType

GLANCE_SHARE: Mapping[float, float] = {0.1: 0.3, 0.4: 0.4, 0.7: 0.5, 1.0: 0.6}
"""By difficulty: the harder the question, the more often the Solver only guesses, as a lazy pupil would."""


def propose(subject: Subject) -> Demonstration:
    """Look, work a question out, then write it with its answer as one JSON object."""
    program, answer = subject.question()
    candidate = json_object(question=text(program), answer=answer.text)
    completion = subject.trace(answer) + END_OF_THINKING + candidate
    return subject.demonstration(
        CallType.PROPOSE, program, answer.text, case="right", completion=completion, question=""
    )


def solve(subject: Subject) -> Demonstration:
    """Look and work the answer out, or only glance; then box it."""
    program, answer = subject.question()
    glanced = subject.rng.random() < GLANCE_SHARE[program.difficulty]
    thinking = glance(answer.text) if glanced else subject.trace(answer)
    completion = f"{thinking}{END_OF_THINKING}<answer>\\boxed{{{answer.text}}}</answer>"
    case = "glanced" if glanced else "looked"
    return subject.demonstration(CallType.SOLVE, program, answer.text, case=case, completion=completion)


def glance(answer: str) -> str:
    """The thinking block of a Solver that does not look closely."""
    return f"answer {answer}"


def is_glance(reasoning: str) -> bool:
    """Whether a thinking block shows no more than an answer."""
    return reasoning.startswith("answer ")
