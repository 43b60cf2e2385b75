"""The Solver: image and question -> prompt, completion -> reasoning and boxed answer (docs/algorithm.md, step 4)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trinity_vlm.config import RolesConfig
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.text import ThinkingError, checked_prefix, has_thinking_tag, one_line, split_thinking
from trinity_vlm.types import CallType, Completion, ImageRecord, Prompt

SolutionError = (
    Literal[
        "truncated",
        "no_answer",
        "many_answers",
        "no_box",
        "many_boxes",
        "box_outside_answer",
        "unbalanced_box",
        "empty_box",
    ]
    | ThinkingError
)

_ANSWER_OPEN = "<answer>"
_ANSWER_CLOSE = "</answer>"
_BOX = re.compile(r"\\boxed(?![A-Za-z])")
_BOX_OPEN = re.compile(r"\\boxed\s*\{")
_INVISIBLE = re.compile(r"\\(?:text|mathrm|mathbf|mbox|quad|[,;:! ])|[{}$~\s]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedSolution:
    """A Solver completion read. ``reasoning`` is the thinking block, ``answer`` the clean content of the only box;
    both None unless ``format_valid``."""

    format_valid: bool
    error: SolutionError | None
    reasoning: str | None = None
    answer: str | None = None


class Solver:
    """Answers a question about an image. ConfigError for an unusable ``roles.thinking_prefix``."""

    def __init__(self, prompts: PromptSet, config: RolesConfig) -> None:
        self._prompts = prompts
        self._prefix = checked_prefix(config)

    def prompt(self, image: ImageRecord, question: str) -> Prompt:
        """The solving call; its completion continues the thinking prefix."""
        return self._prompts.render(CallType.SOLVE, image, self._prefix, question=question)

    def parse(self, completion: Completion) -> ParsedSolution:
        """R_fmt^S and the solution. The first rule that fails names the error.

        Rules: not truncated; one closed thinking block; behind it exactly one ``<answer>...</answer>``; in it exactly
        one ``\\boxed{}`` with balanced braces that is not empty; no other box, not even the bare command, anywhere
        else, the thinking included. Prose around the answer block and around the box is tolerated.
        """
        if completion.truncated:
            return ParsedSolution(False, "truncated")
        split = split_thinking(completion.text, self._prefix)
        if split.error:
            return ParsedSolution(False, split.error)
        if has_thinking_tag(split.rest):
            return ParsedSolution(False, "ambiguous_thinking")
        block, error = _answer_block(split.thinking, split.rest)
        if error:
            return ParsedSolution(False, error)
        content = _box_content(block)
        if content is None:
            return ParsedSolution(False, "unbalanced_box")
        answer = one_line(content)
        if not _INVISIBLE.sub("", answer):
            return ParsedSolution(False, "empty_box")
        return ParsedSolution(True, None, split.thinking, answer)


def _answer_block(thinking: str, rest: str) -> tuple[str, SolutionError | None]:
    """The inside of the answer tags, and what is wrong with the number and place of tags and boxes, if anything."""
    if rest.count(_ANSWER_OPEN) > 1 or rest.count(_ANSWER_CLOSE) > 1:
        return "", "many_answers"
    before, _, after_open = rest.partition(_ANSWER_OPEN)
    block, closing, after = after_open.partition(_ANSWER_CLOSE)
    if not closing:
        return "", "no_answer"
    if any(_BOX.search(part) for part in (thinking, before, after)):
        return block, "box_outside_answer"
    if len(_BOX.findall(block)) > 1:
        return block, "many_boxes"
    return block, None if _BOX_OPEN.search(block) else "no_box"


def _box_content(text: str) -> str | None:
    """What the first box of ``text`` holds up to its matching brace (escaped braces don't count); None without one."""
    opening = _BOX_OPEN.search(text)
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None
