"""What a refusal for length says about the room behind the prompt. Pure.

Servers word it in many ways, and most say the same of a prompt that is too long as of a budget that is: only the
numbers tell them apart. The wordings known here are vLLM's since 0.6 and OpenAI's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ABOUT_LENGTH = re.compile(r"context_length_exceeded|maximum context length|maximum model length")
_ABOUT_BUDGET = re.compile(r"max_tokens|max_completion_tokens|output tokens|in the completion")
_BUDGET_ALONE = re.compile(r"max_(?:completion_)?tokens=\d+ cannot be greater than")
_CONTEXT = re.compile(r"(?:maximum context length is|maximum model length of) (\d+)")
_PROMPT = re.compile(r"(?:request has|prompt contains|resulted in) (\d+) (?:input )?tokens|prompt \(length (\d+)\)")
_TOTAL_AND_BUDGET = re.compile(r"requested (\d+) tokens \(.*?(\d+) in the completion\)")
_PROMPT_AT_LEAST = re.compile(r"at least (\d+) input tokens|upper bound for (\d+) input tokens")


@dataclass(frozen=True, slots=True)
class Room:
    """``tokens`` left behind the prompt: 0 for a prompt that is too long itself, None when only the server knows."""

    tokens: int | None


def stated_room(refusal: str) -> Room | None:
    """The room that a refusal leaves; None when it is about something else or does not say."""
    if _BUDGET_ALONE.search(refusal):
        return Room(None)
    if not _ABOUT_LENGTH.search(refusal):
        return None
    context, prompt, bound = _number(_CONTEXT, refusal), _prompt_tokens(refusal), _number(_PROMPT_AT_LEAST, refusal)
    if context is not None and prompt is not None:
        return Room(max(0, context - prompt))
    if context is not None and bound is not None:
        return Room(None if bound < context else 0)
    return None if _ABOUT_BUDGET.search(refusal) else Room(0)


def _prompt_tokens(refusal: str) -> int | None:
    parts = _TOTAL_AND_BUDGET.search(refusal)
    return int(parts[1]) - int(parts[2]) if parts else _number(_PROMPT, refusal)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(group for group in found.groups() if group is not None)) if found else None
