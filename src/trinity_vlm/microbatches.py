"""Which rollouts go through the model together: a group's rollouts behind one prompt, rows of similar length abreast.

    rollouts ──packs──▶ one row per prompt ──microbatches──▶ one forward-backward pass each

Nothing here changes the update, only its cost: gradients of micro-batches are sums (Eq. 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trinity_vlm.backbone import Backbone, Batch, EncodedPrompt
from trinity_vlm.types import Rollout

SHORT_ROW_TOKENS = 1024
"""Rows up to this length share padded batches with a mask per query, whose attention costs the square of the longest
row; where the model can, a longer row goes alone, without a mask."""

LENGTH_SPREAD = 1.5
"""A micro-batch's longest row is at most this many times its shortest: the rest would be padding."""


@dataclass(frozen=True, slots=True)
class Item:
    """A rollout ready for the forward pass; ``rollout_logprobs`` [T] on the CPU, None: take the forward's own."""

    rollout: Rollout
    encoded: EncodedPrompt
    rollout_logprobs: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.encoded.input_ids) + self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion."""
        return len(self.rollout.completion.token_ids)


@dataclass(frozen=True, slots=True)
class Pack:
    """Rollouts of one prompt in one row; ``length`` in tokens, the prompt counted once."""

    items: tuple[Item, ...]
    length: int


def packs(items: Sequence[Item], longest: int) -> list[Pack]:
    """A group's rollouts share a row, and so the computation of their prompt, up to ``longest`` tokens."""
    rows: dict[tuple[object, ...], list[Pack]] = {}
    for item in items:
        same = rows.setdefault((item.encoded.image_key, item.encoded.input_ids), [])
        shared = same[-1].length + item.num_tokens if same else 0
        if same and shared <= longest:
            same[-1] = Pack((*same[-1].items, item), shared)
        else:
            same.append(Pack((item,), item.length))
    return [pack for same in rows.values() for pack in same]


def microbatches(rows: Sequence[Pack], tokens: int, short: int) -> Iterator[list[Pack]]:
    """Rows of similar length abreast, at most ``tokens`` padded tokens (one row at least), the longest rows first; rows
    of more than ``short`` tokens alone."""
    batch: list[Pack] = []
    for pack in sorted(rows, key=lambda p: p.length, reverse=True):
        if batch and not _joins(batch, pack, tokens, short):
            yield batch
            batch = []
        batch.append(pack)
    if batch:
        yield batch


def _joins(batch: Sequence[Pack], pack: Pack, tokens: int, short: int) -> bool:
    widest = batch[0].length
    fits = widest * (len(batch) + 1) <= tokens
    return fits and widest <= min(short, LENGTH_SPREAD * pack.length)


def collate_packs(backbone: Backbone, batch: Sequence[Pack]) -> Batch:
    """One micro-batch on the model's device, its sequences in the order of the packs' items."""
    completions = [[item.rollout.completion.token_ids for item in pack.items] for pack in batch]
    prompts = [pack.items[0].encoded for pack in batch]
    if len(batch) == 1 and backbone.shares_prompts and batch[0].length > SHORT_ROW_TOKENS:
        return backbone.collate_row(prompts[0], completions[0])
    if all(len(row) == 1 for row in completions):
        return backbone.collate([(p, row[0]) for p, row in zip(prompts, completions, strict=True)], pad="right")
    return backbone.collate_shared(list(zip(prompts, completions, strict=True)))
