"""Decoding a batch of sequences: one prefill per distinct prompt, then a token a step for every unfinished row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from trinity_vlm.backbone import Backbone, EncodedPrompt
from trinity_vlm.engine.constrained import Constraint
from trinity_vlm.engine.kv_cache import growing_cache
from trinity_vlm.engine.prefixes import split_prompts
from trinity_vlm.engine.protocol import Sampling
from trinity_vlm.engine.sampling import SamplingRows, chosen_logprobs, sample

_COMPACT_BELOW = 0.75


@dataclass(slots=True, eq=False)
class Row:
    """One completion in the making. ``budget``: tokens it may grow to, at least 1."""

    prompt: EncodedPrompt
    sampling: Sampling
    seed: int
    budget: int
    want_logprobs: bool = False
    constraint: Constraint | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def finished(self) -> bool:
        return self.ended or len(self.token_ids) >= self.budget


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Rows ready for their first token: hidden states [B, H], attention mask over the prompts [B, P], the rotary
    position of the first new token [B], and the keys and values of the distinct prompts with each row's index."""

    hidden: Tensor
    mask: Tensor
    next_position: Tensor
    cache: DynamicCache
    prompt_of: Tensor


def prefill(backbone: Backbone, rows: Sequence[Row]) -> Prefill:
    """Run each distinct prompt once, left-padded to a common length P.

    Where it pays, what the prompts of an image begin with runs once, and P is its length and that of the rests.
    """
    distinct: dict[tuple[str | None, tuple[int, ...]], int] = {}
    prompts: list[EncodedPrompt] = []
    prompt_of = []
    for row in rows:
        key = (row.prompt.image_key, row.prompt.input_ids)
        if key not in distinct:
            distinct[key] = len(prompts)
            prompts.append(row.prompt)
        prompt_of.append(distinct[key])
    cache = growing_cache(backbone.model.config)
    split = split_prompts(prompts) if backbone.shares_prompts else None
    batch = backbone.collate([(p, ()) for p in (split.prefixes if split else prompts)], "left")
    hidden = backbone.hidden_states(batch, cache)
    if split:
        prefix_of = torch.tensor(split.prefix_of, device=backbone.device)
        cache.batch_select_indices(prefix_of)
        rest = backbone.collate([(p, ()) for p in split.suffixes], "left")
        batch = replace(rest, attention_mask=torch.cat([batch.attention_mask[prefix_of], rest.attention_mask], dim=1))
        hidden = backbone.hidden_states(batch, cache)
    index = torch.tensor(prompt_of, device=backbone.device)
    starts = torch.tensor([p.next_position for p in prompts], device=backbone.device)
    return Prefill(hidden[index, -1], batch.attention_mask[index], starts[index], cache, index)


@torch.no_grad()
def decode(backbone: Backbone, rows: Sequence[Row]) -> None:
    """Fill ``token_ids``, ``logprobs`` and ``ended`` of every row under the active adapter.

    Finished rows leave the batch once they make up a quarter of it.
    """
    backbone.model.eval()
    start = prefill(backbone, rows)
    hidden, cache, next_position = start.hidden, start.cache, start.next_position
    cache.batch_select_indices(start.prompt_of)
    num_steps, width = max(row.budget for row in rows), start.mask.shape[1]
    mask = torch.nn.functional.pad(start.mask, (0, num_steps), value=1)
    if backbone.attends_by_mask:
        mask = mask[:, None, None].bool()  # as the layers take it: nothing is built from it at every step
    active, rules = list(rows), sampling_rows(backbone, rows)
    for step in range(num_steps):
        logits = backbone.logits(hidden)
        tokens = sample(constrained(logits, active), rules, torch.tensor(step, device=logits.device))
        record(active, tokens.tolist(), logprob_list(logits, tokens, active), backbone.eos_ids)
        unfinished = [i for i, row in enumerate(active) if not row.finished]
        if not unfinished:
            return
        if len(unfinished) <= _COMPACT_BELOW * len(active):
            kept = torch.tensor(unfinished, device=tokens.device)
            active = [active[i] for i in unfinished]
            cache.batch_select_indices(kept)
            tokens, mask, next_position, rules = tokens[kept], mask[kept], next_position[kept], rules.select(kept)
        seen, position = mask[..., : width + step + 1], (next_position + step)[:, None]
        hidden = backbone.next_hidden(tokens[:, None], seen, position, cache)[:, -1]


def sampling_rows(backbone: Backbone, rows: Sequence[Row]) -> SamplingRows:
    """How the rows draw, on the model's device."""
    return SamplingRows.of([r.seed for r in rows], [r.sampling for r in rows], backbone.num_logits, backbone.device)


def constrained(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits [B, V] with -inf on what the rows' schemas forbid next."""
    masks = [row.constraint.bitmask() if row.constraint else None for row in rows]
    if all(mask is None for mask in masks):
        return logits
    vocabulary = logits.shape[1]
    everything = np.full((vocabulary + 31) // 32, -1, dtype=np.int32)
    words = np.stack([everything if m is None else m for m in masks]).astype("<i4", copy=False)
    allowed = np.unpackbits(words.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
    return torch.where(torch.from_numpy(allowed).to(logits.device), logits, float("-inf"))


def logprob_list(logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> list[float] | None:
    """Log-probabilities of the drawn tokens when any row asks for them."""
    return chosen_logprobs(logits, tokens).tolist() if any(row.want_logprobs for row in rows) else None


def record(rows: Sequence[Row], tokens: Sequence[int], logprobs: Sequence[float] | None, ends: frozenset[int]) -> None:
    """Append one step's tokens to the rows that still take them."""
    for i, row in enumerate(rows):
        if row.finished:
            continue
        row.token_ids.append(tokens[i])
        row.ended = tokens[i] in ends
        if row.want_logprobs and logprobs is not None:
            row.logprobs.append(logprobs[i])
        if row.constraint and not row.ended:
            row.constraint.advance(tokens[i])
