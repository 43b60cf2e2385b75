"""Prompts that begin alike: one image and instruction, different questions. Their common beginning is computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
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


@dataclass(frozen=True, slots=True)
class _Alike:
    """Distinct prompts of one image.

    seen: their ids; common: ids they all begin with, short of the whole of any; longest: tokens of the longest
    pictures: tokens up to the last, in any of them, that is not text
    """

    seen: frozenset[tuple[int, ...]]
    common: tuple[int, ...]
    longest: int
    pictures: int

    def joined(self, prompt: EncodedPrompt) -> _Alike:
        ids, pairs = prompt.input_ids, zip(self.common, prompt.input_ids[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        longest, pictures = max(self.longest, len(ids)), max(self.pictures, _pictures(prompt))
        return _Alike(self.seen | {ids}, self.common[:common], longest, pictures)


@dataclass(frozen=True, slots=True)
class Beginnings:
    """What prompts begin with, by image; a prompt that comes again changes nothing.

    tokens: of all prompts; longest: of the longest
    """

    by_image: Mapping[str, _Alike] = field(default_factory=dict)
    tokens: int = 0
    longest: int = 0

    def joined(self, prompt: EncodedPrompt) -> Beginnings:
        """With one more prompt."""
        key, ids = str(prompt.image_key), prompt.input_ids
        alike = self.by_image.get(key) or _Alike(frozenset(), ids[:-1], 0, 0)
        if ids in alike.seen:
            return self
        by_image = {**self.by_image, key: alike.joined(prompt)}
        return Beginnings(by_image, self.tokens + len(ids), max(self.longest, len(ids)))

    @property
    def pays(self) -> bool:
        """Whether a split saves a third of the tokens, and leaves every picture in a beginning."""
        groups = self.by_image.values()
        saved = sum(len(g.common) * (len(g.seen) - 1) for g in groups)
        return saved >= _MIN_SAVED * self.tokens and all(g.pictures <= len(g.common) for g in groups)

    @property
    def width(self) -> int:
        """Columns that every prompt takes: split, those of the longest beginning and of the longest rest."""
        if not self.pays:
            return self.longest
        groups = self.by_image.values()
        return max(len(g.common) for g in groups) + max(g.longest - len(g.common) for g in groups)


def split_prompts(prompts: Sequence[EncodedPrompt]) -> SplitPrompts | None:
    """The distinct prompts split where those of one image part; None unless it saves a third of their tokens.

    A rest holds at least one token, and text only.
    """
    beginnings = reduce(Beginnings.joined, prompts, Beginnings())
    if not beginnings.pays:
        return None
    index = {key: i for i, key in enumerate(beginnings.by_image)}
    prefix_of = tuple(index[str(p.image_key)] for p in prompts)
    cuts = [len(alike.common) for alike in beginnings.by_image.values()]
    prefixes = tuple(_part(prompts[prefix_of.index(i)], slice(cut)) for i, cut in enumerate(cuts))
    suffixes = tuple(_part(p, slice(cuts[i], None)) for p, i in zip(prompts, prefix_of, strict=True))
    texts = tuple(replace(s, image_inputs={}, image_uid=None, image_key=None, token_inputs={}) for s in suffixes)
    return SplitPrompts(prefixes, texts, prefix_of)


def _pictures(prompt: EncodedPrompt) -> int:
    """Tokens up to the last that is not text; token inputs are 0 on text."""
    return max((int(v.nonzero().max()) + 1 for v in prompt.token_inputs.values() if v.any()), default=0)


def _part(prompt: EncodedPrompt, part: slice) -> EncodedPrompt:
    positions = torch.arange(len(prompt.input_ids)).expand(3, -1) if prompt.positions is None else prompt.positions
    return replace(
        prompt,
        input_ids=prompt.input_ids[part],
        token_inputs={name: values[part] for name, values in prompt.token_inputs.items()},
        positions=positions[:, part],
    )
