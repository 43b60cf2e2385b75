"""Prompts that begin alike: one image and instruction, different questions. Their common beginning is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from trinity_vlm.backbone import EncodedPrompt

_MIN_SAVED = 1 / 3


@dataclass(frozen=True, slots=True, eq=False)
class SplitPrompts:
    """Prompts as a beginning and a rest; ``prefix_of[i]`` is the beginning of the i-th prompt."""

    prefixes: tuple[EncodedPrompt, ...]
    suffixes: tuple[EncodedPrompt, ...]
    prefix_of: tuple[int, ...]


def split_prompts(prompts: Sequence[EncodedPrompt]) -> SplitPrompts | None:
    """The distinct prompts split where those of one image part; None unless it saves a third of their tokens.

    A rest holds at least one token, and text only.
    """
    groups: dict[str, list[EncodedPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(str(prompt.image_key), []).append(prompt)
    lengths = {key: _common_length([p.input_ids for p in group]) for key, group in groups.items()}
    saved = sum(lengths[key] * (len(group) - 1) for key, group in groups.items())
    if saved < _MIN_SAVED * sum(len(p.input_ids) for p in prompts):
        return None
    cuts = [lengths[str(p.image_key)] for p in prompts]
    suffixes = tuple(_part(p, slice(cut, None)) for p, cut in zip(prompts, cuts, strict=True))
    if any(bool(values.any()) for suffix in suffixes for values in suffix.token_inputs.values()):
        return None
    prefixes = tuple(_part(group[0], slice(lengths[key])) for key, group in groups.items())
    index = {key: i for i, key in enumerate(groups)}
    texts = tuple(replace(s, image_inputs={}, image_uid=None, image_key=None, token_inputs={}) for s in suffixes)
    return SplitPrompts(prefixes, texts, tuple(index[str(p.image_key)] for p in prompts))


def _common_length(sequences: Sequence[tuple[int, ...]]) -> int:
    """Tokens all sequences begin with, short of the whole of any."""
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))
    return min(sum(1 for _ in same), min(map(len, sequences)) - 1)


def _part(prompt: EncodedPrompt, part: slice) -> EncodedPrompt:
    positions = torch.arange(len(prompt.input_ids)).expand(3, -1) if prompt.positions is None else prompt.positions
    return replace(
        prompt,
        input_ids=prompt.input_ids[part],
        token_inputs={name: values[part] for name, values in prompt.token_inputs.items()},
        positions=positions[:, part],
    )
