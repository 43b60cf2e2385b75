"""Model text on its way from one call into another: special tokens, thinking blocks, one-line fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trinity_vlm.config import RolesConfig
from trinity_vlm.errors import ConfigError

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

ThinkingError = Literal["no_thinking", "unclosed_thinking", "ambiguous_thinking"]

_PIPE_TOKEN = re.compile(r"<[|｜][^<>|｜]{0,64}[|｜]>")
_PIPE_OPENING = re.compile(r"<(?=[|｜])")
_NAMED_TOKEN = re.compile(
    r"</?(?:think|thinking|answer|analysis|tool_call|tool_response|image|img|video|audio|s|pad|unk|bos|eos|mask"
    r"|start_of_turn|end_of_turn|start_of_image|end_of_image|image_soft_token|img_context)>",
    re.IGNORECASE,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def strip_special_tokens(text: str) -> str:
    """Remove what a chat template, an image processor or a parser could take for markup.

    Removed: ``<|...|>`` tokens, thinking and answer tags, image placeholders of common model families, control
    characters. Each leaves a space, and a ``<|`` without its end is pulled apart, so that no token can be
    assembled from the pieces (``<|im_<|x|>end|>``). Line breaks stay. Idempotent.
    """
    text = _PIPE_TOKEN.sub(" ", text)
    text = _PIPE_OPENING.sub("< ", text)
    text = _NAMED_TOKEN.sub(" ", text)
    return _CONTROL.sub(" ", text).strip()


def one_line(text: str) -> str:
    """``strip_special_tokens`` with every run of white space as one space: the form of questions and answers."""
    return " ".join(strip_special_tokens(text).split())


@dataclass(frozen=True, slots=True)
class ThinkingSplit:
    """A completion cut at the end of its thinking block; both texts are empty when ``error`` is set."""

    error: ThinkingError | None
    thinking: str
    rest: str


def split_thinking(text: str, prefix: str) -> ThinkingSplit:
    """Put the prompt's thinking prefix back before ``text`` and cut after the first closing tag.

    With an empty prefix the model opens the tag itself. A doubled opening tag at the very start (the model repeats
    the one its prompt already holds) counts as one; an opening tag later inside the block leaves open which closing
    tag ends it and is an error. What stands after the block is the caller's to judge.
    """
    whole = (prefix + text).lstrip()
    if not whole.startswith(THINK_OPEN):
        return ThinkingSplit("no_thinking", "", "")
    body = whole.removeprefix(THINK_OPEN).lstrip().removeprefix(THINK_OPEN)
    thinking, closing, rest = body.partition(THINK_CLOSE)
    if not closing:
        return ThinkingSplit("unclosed_thinking", "", "")
    if THINK_OPEN in thinking:
        return ThinkingSplit("ambiguous_thinking", "", "")
    return ThinkingSplit(None, thinking.strip(), rest)


def has_thinking_tag(text: str) -> bool:
    """Whether an opening or closing thinking tag occurs in ``text``."""
    return THINK_OPEN in text or THINK_CLOSE in text


def checked_prefix(config: RolesConfig) -> str:
    """The configured thinking prefix; ConfigError when it neither opens a thinking block nor is empty."""
    prefix = config.thinking_prefix
    default = RolesConfig.model_fields["thinking_prefix"].default
    if prefix and (not prefix.startswith(THINK_OPEN) or THINK_CLOSE in prefix):
        raise ConfigError(
            f"roles.thinking_prefix={prefix!r}: must be empty (the model opens the tag itself) or start with "
            f"{THINK_OPEN} and not hold {THINK_CLOSE}; the default is {default!r}"
        )
    return prefix
