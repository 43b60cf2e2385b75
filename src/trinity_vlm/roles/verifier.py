"""The Verifier: prompts, JSON schemas and parsers of its four calls (Section 2; docs/algorithm.md, steps 2 and 5-7)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from trinity_vlm.config import RolesConfig
from trinity_vlm.roles.jsontext import json_objects
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.text import THINK_CLOSE, THINK_OPEN, checked_prefix
from trinity_vlm.types import (
    DIFFICULTY_LEVELS,
    REASONING_LEVELS,
    CallType,
    Completion,
    ImageRecord,
    Prompt,
    ReasoningVerdict,
    ScreeningVerdict,
)

BINARY: tuple[int, ...] = (0, 1)
WINNERS = ("ref", "majority")

_DECIMAL = re.compile(r"[0-9]{1,3}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class EquivalenceVerdict:
    """Whether prediction and reference mean the same (tier iii); ``match`` is 0 when unparsed."""

    parsed: bool
    match: int
    raw: str = ""


@dataclass(frozen=True, slots=True)
class DisputeVerdict:
    """Whose answer the Verifier's own solution supports; ``winner`` is None when unparsed."""

    parsed: bool
    winner: Literal["ref", "majority"] | None
    justification: str = ""
    raw: str = ""


def verdict_schemas(justification_chars: int) -> dict[CallType, dict[str, Any]]:
    """JSON schemas of the four verdicts, keys in output order; justifications hold up to ``justification_chars``."""
    text = {"type": "string", "maxLength": justification_chars}
    binary = {"type": "integer", "enum": list(BINARY)}
    return {
        CallType.SCREEN: _closed_object(
            justification=text,
            fact_q=binary,
            corr_a=binary,
            difficulty={"type": "number", "enum": list(DIFFICULTY_LEVELS)},
        ),
        CallType.REASON: _closed_object(
            justification=text, reasoning_score={"type": "number", "enum": list(REASONING_LEVELS)}
        ),
        CallType.EQUIVALENCE: _closed_object(match=binary),
        CallType.DISPUTE: _closed_object(correct_answer={"type": "string", "enum": list(WINNERS)}, justification=text),
    }


class Verifier:
    """Screens questions, scores reasoning, compares answers, settles disputes.

    ``schemas`` holds what an engine with structured output may enforce per call; the dispute call thinks first, so
    its schema applies only after ``schema_after(call)``. Values are read tolerantly where only one reading exists:
    ``1``, ``1.0`` and ``"1"`` are the same, booleans and values outside a call's set are not verdicts. A truncated
    completion counts when its object is complete.
    """

    def __init__(self, prompts: PromptSet, config: RolesConfig) -> None:
        self._prompts = prompts
        self._prefix = checked_prefix(config)
        self.schemas: Mapping[CallType, Mapping[str, Any]] = verdict_schemas(config.justification_chars)

    @staticmethod
    def schema_after(call: CallType) -> str | None:
        """The text after which the schema of ``call`` applies; None: from the first token."""
        return THINK_CLOSE if call is CallType.DISPUTE else None

    def screening_prompt(self, image: ImageRecord, question: str, answer: str) -> Prompt:
        """QA screening of one candidate (step 2)."""
        return self._prompts.render(CallType.SCREEN, image, question=question, answer=answer)

    def reasoning_prompt(self, image: ImageRecord, question: str, reasoning: str) -> Prompt:
        """Reasoning score of one solution's thinking block (step 7)."""
        return self._prompts.render(CallType.REASON, image, question=question, reasoning=reasoning)

    def equivalence_prompt(self, question: str, reference: str, prediction: str) -> Prompt:
        """Text-only comparison of two answers (step 5, tier iii)."""
        return self._prompts.render(
            CallType.EQUIVALENCE, None, question=question, reference=reference, prediction=prediction
        )

    def dispute_prompt(
        self, image: ImageRecord, question: str, reference: str, majority: str, reasoning: str
    ) -> Prompt:
        """Reference against consensus, with one supporting trace (step 6); the completion continues the prefix."""
        return self._prompts.render(
            CallType.DISPUTE,
            image,
            self._prefix,
            question=question,
            reference=reference,
            majority=majority,
            reasoning=reasoning,
        )

    def parse_screening(self, completion: Completion) -> ScreeningVerdict:
        """fact_q, corr_a (0 whenever fact_q is 0) and difficulty; all zero when unparsed."""
        verdict = _only_verdict(completion.text, ("justification", "fact_q", "corr_a", "difficulty"))
        fact_q, corr_a = _level(verdict.get("fact_q"), BINARY), _level(verdict.get("corr_a"), BINARY)
        difficulty = _level(verdict.get("difficulty"), DIFFICULTY_LEVELS)
        if fact_q is None or corr_a is None or difficulty is None:
            return ScreeningVerdict(False, 0, 0, 0.0, raw=completion.text)
        return ScreeningVerdict(
            True, int(fact_q), int(fact_q and corr_a), difficulty, verdict["justification"], completion.text
        )

    def parse_reasoning(self, completion: Completion) -> ReasoningVerdict:
        """The reasoning score; 0 when unparsed."""
        verdict = _only_verdict(completion.text, ("justification", "reasoning_score"))
        score = _level(verdict.get("reasoning_score"), REASONING_LEVELS)
        if score is None:
            return ReasoningVerdict(False, 0.0, raw=completion.text)
        return ReasoningVerdict(True, score, verdict["justification"], completion.text)

    def parse_equivalence(self, completion: Completion) -> EquivalenceVerdict:
        """match; 0 when unparsed."""
        match = _level(_only_verdict(completion.text, ("match",)).get("match"), BINARY)
        return EquivalenceVerdict(match is not None, int(match or 0), completion.text)

    def parse_dispute(self, completion: Completion) -> DisputeVerdict:
        """The winner, read behind the closed thinking block; without one the Verifier has not solved the question."""
        thinking, _, rest = (self._prefix + completion.text).lstrip().partition(THINK_CLOSE)
        verdict = _only_object(rest, ("correct_answer", "justification")) if thinking.startswith(THINK_OPEN) else {}
        winner = verdict.get("correct_answer")
        winner = winner.strip().lower() if isinstance(winner, str) else None
        if winner not in WINNERS:
            return DisputeVerdict(False, None, raw=completion.text)
        return DisputeVerdict(True, cast(Literal["ref", "majority"], winner), verdict["justification"], completion.text)


def _closed_object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _only_verdict(text: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The verdict of a call that should answer directly; a thinking block the model puts first is skipped.

    The tag may also stand inside a justification: then nothing behind it is an object, and the whole text is read.
    """
    head, closing, tail = text.partition(THINK_CLOSE)
    if not closing and head.lstrip().startswith(THINK_OPEN):
        return {}
    return (closing and _only_object(tail, keys)) or _only_object(text, keys)


def _only_object(text: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The single object in ``text`` that holds all ``keys``, its justification a string; empty when there is none
    or a second one contradicts it."""
    verdicts = [o for o in json_objects(text) if all(key in o for key in keys)]
    if len(verdicts) != 1 or not isinstance(verdicts[0].get("justification", ""), str):
        return {}
    return verdicts[0]


def _level(value: object, levels: tuple[float, ...]) -> float | None:
    """The member of ``levels`` that ``value`` equals: a number or the text of a plain decimal, never a bool."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = float(value.strip()) if _DECIMAL.fullmatch(value.strip()) else None
    return next((level for level in levels if level == value), None)
