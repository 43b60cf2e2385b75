"""From a chat-completions answer to Completions: token ids where the server names them, else as many unknown ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_vlm.engine.openai.client import ServerFailure
from trinity_vlm.roles.text import THINK_CLOSE
from trinity_vlm.types import Completion, FinishReason

UNKNOWN_ID = -1
"""Stands for a token that a server counted but did not name: lengths are right, and training on it fails at once."""

# A filtered completion was cut off; any other reason ("abort", "error") makes the answer unusable.
_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "content_filter": "length"}


def read_completions(answer: Mapping[str, Any], samples: int, want_logprobs: bool) -> list[Completion]:
    """The ``samples`` completions of one call, in order; a thinking block that a server cut off is put back.

    Raises ServerFailure when the answer is not a chat completion of that many choices.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        usage = answer.get("usage") or {}
        prompt_ids = _ids(answer.get("prompt_token_ids"), usage.get("prompt_tokens"))
        sampled = _unnamed(usage.get("completion_tokens")) if len(choices) == 1 else ()
        completions = [_completion(c, prompt_ids, sampled, want_logprobs) for c in choices]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerFailure(f"an answer that is not a chat completion ({type(error).__name__}: {error})") from None
    if len(completions) != samples:
        raise ServerFailure(f"{len(completions)} choices where {samples} were asked for")
    return completions


def empty_completions(n: int, prompt_ids: Sequence[int], want_logprobs: bool) -> list[Completion]:
    """What a prompt gives that leaves no room for one token."""
    return [Completion(tuple(prompt_ids), (), "", "length", () if want_logprobs else None)] * n


def _completion(
    choice: Mapping[str, Any], prompt_ids: tuple[int, ...], unnamed: tuple[int, ...], want_logprobs: bool
) -> Completion:
    named = choice.get("token_ids")
    token_ids = unnamed if named is None else _ids(named, None)
    logprobs = None
    if want_logprobs and choice.get("logprobs"):
        logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
        if len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    return Completion(
        prompt_token_ids=prompt_ids,
        token_ids=token_ids,
        text=_text(choice["message"]),
        finish_reason=_FINISH[choice["finish_reason"]],
        logprobs=logprobs,
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not reasoning:
        return content
    return f"{reasoning}{THINK_CLOSE}{content}" if content else reasoning


def _ids(named: Sequence[int] | None, count: int | None) -> tuple[int, ...]:
    return _unnamed(count) if named is None else tuple(int(i) for i in named)


def _unnamed(count: int | None) -> tuple[int, ...]:
    return (UNKNOWN_ID,) * (count or 0)
