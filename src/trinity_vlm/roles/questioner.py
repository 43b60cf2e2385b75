"""The Questioner: image -> prompt, completion -> question and short answer (Section 2; docs/algorithm.md, step 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from trinity_vlm.config import RolesConfig
from trinity_vlm.roles.jsontext import json_objects
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.text import ThinkingError, checked_prefix, has_thinking_tag, one_line, split_thinking
from trinity_vlm.types import CallType, Completion, ImageRecord, Prompt

MAX_ANSWER_WORDS = 10

CandidateError = (
    Literal[
        "truncated",
        "no_json",
        "many_json",
        "missing_key",
        "not_string",
        "empty_question",
        "empty_answer",
        "placeholder_question",
        "placeholder_answer",
        "example_question",
        "example_answer",
        "long_answer",
        "sentence_answer",
        "explained_answer",
    ]
    | ThinkingError
)

_PLACEHOLDERS = re.compile(
    r"(?:(?:your|the|a|an|insert|insert your) )?(?:short )?(?:question|answer)(?: here)?"
    r"|n/a|n\.a\.?|tbd|todo|placeholder",
    re.IGNORECASE,
)
_BLANK = re.compile(r"[.…_?\s]*")
_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)\]]*(?=\s|$)|[。！？]")
_ABBREVIATION = re.compile(
    r"\(?(?:al|approx|ave|bros|ca|ch|cm|co|corp|dept|dr|ed|eq|est|etc|figs?|ft|gen|gov|hrs?|in|inc|jr|kg|km|lbs?|ltd|max"
    r"|min|ml|mm|mrs?|ms|mt|nos?|oz|pp|prof|pts?|rd|ref|rep|sec|spp?|sq|sr|st|tab|univ|var|vol|vs)",
    re.IGNORECASE,
)
_SENTENCE_WORDS = 3
_CLAUSE = re.compile(
    r"(?:the|it|this|that|these|those|there|they|he|she|we|you|i|answer)\b.*?"
    r"(?<!\bthat )(?<!\bwhich )(?<!\bwho )\b(?:is|are|was|were|has|have|equals)\b",
    re.IGNORECASE,
)
_EXPLANATION = re.compile(
    r"\bbecause\b|\btherefore\b|\bthus\b|\bhence\b|\bso that\b|\bi\.e\.|\bas (?:shown|seen)\b|∴|=>"
    r"|\bwhich (?:is|are|was|were|means|gives|makes|implies|equals)\b|\bthat (?:is|means),"
    r"|\bsince\b.*\b(?:is|are|was|were|has|have|equals)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ParsedCandidate:
    """A Questioner completion read: ``question`` and ``answer`` are clean single lines, None unless format-valid."""

    format_valid: bool
    error: CandidateError | None
    question: str | None = None
    answer: str | None = None


class Questioner:
    """Asks for one hard question about an image. ConfigError for an unusable ``roles.thinking_prefix``."""

    def __init__(self, prompts: PromptSet, config: RolesConfig) -> None:
        self._prompts = prompts
        self._prefix = checked_prefix(config)
        examples = json_objects(prompts.text(CallType.PROPOSE, "system"))
        self._example_questions = _comparable_values(examples, "question")
        self._example_answers = _comparable_values(examples, "answer")

    def prompt(self, image: ImageRecord) -> Prompt:
        """The proposal call; its completion continues the thinking prefix."""
        return self._prompts.render(CallType.PROPOSE, image, self._prefix)

    def parse(self, completion: Completion) -> ParsedCandidate:
        """R_fmt^Q and the candidate. The first rule that fails names the error.

        Rules: not truncated; one closed thinking block; behind it exactly one JSON object, whose ``question`` and
        ``answer`` are non-empty strings (a JSON number is no string) once special tokens are stripped; neither is
        a placeholder or copied from the prompt's own examples; the answer has 1-10 words, is no sentence and
        explains nothing. An example's *answer* counts as copied only from two words on: "4" is a fair answer to
        other questions. Prose and fences around the object and further keys in it are tolerated.
        """
        if completion.truncated:
            return ParsedCandidate(False, "truncated")
        split = split_thinking(completion.text, self._prefix)
        if split.error:
            return ParsedCandidate(False, split.error)
        fields = _read_fields(split.rest)
        if isinstance(fields, str):
            return ParsedCandidate(False, fields)
        question, answer = fields
        if error := self._text_error(question, answer):
            return ParsedCandidate(False, error)
        return ParsedCandidate(True, None, question, answer)

    def _text_error(self, question: str, answer: str) -> CandidateError | None:
        if not question:
            return "empty_question"
        if not answer:
            return "empty_answer"
        if _is_placeholder(question):
            return "placeholder_question"
        if _is_placeholder(answer):
            return "placeholder_answer"
        if _comparable(question) in self._example_questions:
            return "example_question"
        if len(answer.split()) >= 2 and _comparable(answer) in self._example_answers:
            return "example_answer"
        return _answer_form_error(answer)


def _read_fields(rest: str) -> tuple[str, str] | CandidateError:
    """Question and answer of the only object in ``rest``, stripped, possibly empty; or what is wrong."""
    if has_thinking_tag(rest[: max(rest.find("{"), 0)]) or has_thinking_tag(rest[rest.rfind("}") + 1 :]):
        return "ambiguous_thinking"
    objects = json_objects(rest)
    if len(objects) != 1:
        return "many_json" if objects else "no_json"
    fields = objects[0]
    if "question" not in fields or "answer" not in fields:
        return "missing_key"
    question, answer = fields["question"], fields["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        return "not_string"
    return one_line(question), one_line(answer)


def _answer_form_error(answer: str) -> CandidateError | None:
    if len(_WORD.findall(answer)) > MAX_ANSWER_WORDS:
        return "long_answer"
    if _EXPLANATION.search(answer):
        return "explained_answer"
    if _is_sentence(answer):
        return "sentence_answer"
    return None


def _is_sentence(answer: str) -> bool:
    """Three or more words up to a full stop, anything after one, or subject plus finite verb without one.

    Not sentences: "5 cm.", "Yes.", "E. coli", "10 a.m.", "St. Louis", "5! = 120", "2, 4, 8, ...".
    """
    for end in _SENTENCE_END.finditer(answer):
        before, follows = answer[: end.start()], bool(answer[end.end() :].strip())
        words = _WORD.findall(before)
        if not words or _is_abbreviation(words[-1], end.group(), follows):
            continue
        if follows or len(words) >= _SENTENCE_WORDS:
            return True
    return bool(_CLAUSE.match(answer))


def _is_abbreviation(word: str, mark: str, follows: bool) -> bool:
    """Whether a dot (or factorial sign) after ``word`` belongs to the word rather than ending a sentence."""
    if mark.startswith("!"):
        return word[-1].isdigit() or len(word) == 1 or word.endswith(")")
    if not mark.startswith("."):
        return False
    initial = len(word) == 1 and word.isalpha()
    numbering = follows and word[-1].isdigit()
    return initial or numbering or "." in word + mark[1:] or bool(_ABBREVIATION.fullmatch(word))


def _is_placeholder(text: str) -> bool:
    bare = text.strip(" <>[]{}()\"'").rstrip("?!")
    return bool(_BLANK.fullmatch(bare) or _PLACEHOLDERS.fullmatch(bare.rstrip(".")) or _PLACEHOLDERS.fullmatch(bare))


def _comparable(text: str) -> str:
    """Letters and digits only, folded: copies differ from the original at most in spacing and punctuation."""
    return "".join(c for c in text.casefold() if c.isalnum())


def _comparable_values(objects: list[dict[str, Any]], key: str) -> frozenset[str]:
    return frozenset(_comparable(o[key]) for o in objects if isinstance(o.get(key), str)) - {""}
