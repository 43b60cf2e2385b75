"""Demonstrations of QA screening: right answers, wrong references and questions without ground, each kind by itself."""

from __future__ import annotations

from random import Random

from trinity_vlm.environments.microcosm.perturb import misread_answer, neighbouring_answer, plausible_answer
from trinity_vlm.environments.microcosm.programs import Program, evaluate, parse, text
from trinity_vlm.environments.microcosm.sampler import sample_ungrounded
from trinity_vlm.environments.microcosm.scenes import listing
from trinity_vlm.environments.protocol import Answer, Failure
from trinity_vlm.tiny.demonstrations.example import Demonstration, Subject, json_object
from trinity_vlm.tiny.demonstrations.variants import hedge, same_in_other_words
from trinity_vlm.types import CallType

SCREENING_CASES: tuple[tuple[str, float], ...] = (
    ("right", 0.36),
    ("right_reworded", 0.05),
    ("wrong_misread", 0.17),
    ("wrong_neighbour", 0.09),
    ("wrong_malformed", 0.04),
    (Failure.MISSING, 0.09),
    (Failure.AMBIGUOUS, 0.06),
    (Failure.OTHER_DOMAIN, 0.05),
    (Failure.BLIND, 0.06),
    ("unreadable", 0.03),
)
"""Cases and weights. Negatives whose draw finds nothing in a scene (no tie to ask about, say) become ``missing``."""


def screen(subject: Subject) -> Demonstration:
    """Judge a proposed pair: justification (listing, steps, comparison), then the three verdicts."""
    names, weights = zip(*SCREENING_CASES, strict=True)
    case = subject.rng.choices(names, weights)[0]
    if case == "unreadable":
        return _unreadable(subject)
    if isinstance(case, Failure):
        return _ungrounded(subject, case)
    return _grounded(subject, case)


def verdict(justification: str, fact_q: int, corr_a: int, difficulty: float) -> str:
    """The screening output in its fixed key order."""
    return json_object(justification=justification, fact_q=fact_q, corr_a=corr_a, difficulty=difficulty)


def garbled(rng: Random, question: str) -> str:
    """A question with words lost, doubled or out of order, that the environment can no longer read."""
    while True:
        words = question.split()
        for _ in range(rng.randint(1, 2)):
            position = rng.randrange(len(words) - 1)
            edit = rng.choice(("drop", "double", "swap"))
            if edit == "drop":
                del words[position]
            elif edit == "double":
                words.insert(position, words[position])
            else:
                words[position], words[position + 1] = words[position + 1], words[position]
        if parse(" ".join(words)) is None:
            return " ".join(words)


def _grounded(subject: Subject, case: str) -> Demonstration:
    rng = subject.rng
    program, answer = subject.question()
    proposed = answer.text
    if case == "right_reworded":
        proposed = same_in_other_words(rng, answer.text, program)
    elif case == "wrong_malformed":
        proposed = hedge(rng, subject.scene, answer.text)
    elif case != "right":
        read = misread_answer(rng, subject.scene, program) if case == "wrong_misread" else None
        case = "wrong_misread" if read else "wrong_neighbour"
        proposed = read[1].text if read else neighbouring_answer(rng, subject.scene, answer.text)
    right = case.startswith("right")
    justification = f"{subject.trace(answer)}. answer {answer.text}: {'same' if right else 'different'}"
    completion = verdict(justification, 1, int(right), program.difficulty)
    return subject.demonstration(
        CallType.SCREEN, program, answer.text, case=case, completion=completion, answer=proposed
    )


def _ungrounded(subject: Subject, reason: Failure) -> Demonstration:
    found = sample_ungrounded(subject.rng, subject.scene, reason)
    if found is None:
        found = sample_ungrounded(subject.rng, subject.scene, Failure.MISSING)
    if found is None:
        return _grounded(subject, "right")
    program, outcome = found
    completion = verdict(subject.trace(outcome), 0, 0, program.difficulty)
    proposed = _tempting_answer(subject, program)
    return subject.demonstration(
        CallType.SCREEN, program, None, case=outcome.reason, completion=completion, answer=proposed
    )


def _tempting_answer(subject: Subject, program: Program) -> str:
    """For a blind question mostly the answer anybody would give, else one of the right kind."""
    outcome = evaluate(subject.scene, program)
    if isinstance(outcome, Answer) and subject.rng.random() < 0.7:
        return outcome.text
    return plausible_answer(subject.rng, subject.scene, program)


def _unreadable(subject: Subject) -> Demonstration:
    program, answer = subject.question()
    question = garbled(subject.rng, text(program))
    completion = verdict(f"{listing(subject.scene)}. unclear question", 0, 0, 0.1)
    return Demonstration(
        CallType.SCREEN, subject.uid, subject.image, question, completion, case="unreadable", answer=answer.text
    )
