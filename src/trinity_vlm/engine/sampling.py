"""Drawing tokens with noise that depends only on (seed, position, token id).

A sequence's draws are the same alone or in any batch, in any row, on a CPU or a GPU: no generator has a state. Each
uniform is a hash of its counters, turned into Gumbel noise; the arg max of log-probability plus Gumbel noise is a
sample of the softmax. Temperature, top-k, then top-p filter the candidates; temperature 0 takes the likeliest.
Equal logits rank by token id, so that a tie at the edge of top-k falls the same way everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_vlm.engine.protocol import Sampling

# splitmix64 (Steele, Lea and Flood, 2014): golden-ratio increment and the two multipliers, as signed 64-bit numbers
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_LOW_32 = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How each of B rows draws. ``width``: the largest number of candidates any row looks at.

    seeds, top_k: [B] int64; temperature, top_p: [B] float64; filters that are off hold values that keep everything
    """

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    width: int

    @classmethod
    def of(cls, seeds: Sequence[int], rules: Sequence[Sampling], vocabulary: int, device: torch.device) -> SamplingRows:
        """Rows from their seeds and rules; ``vocabulary`` is the number of logits."""
        top_k = [min(rule.top_k or vocabulary, vocabulary) if rule.temperature else 1 for rule in rules]
        return cls(
            torch.tensor(seeds, dtype=torch.int64, device=device),
            torch.tensor([rule.temperature or 1.0 for rule in rules], dtype=torch.float64, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor([rule.top_p if rule.top_p < 1 else 2.0 for rule in rules], dtype=torch.float64, device=device),
            max(top_k),
        )

    @classmethod
    def placeholder(cls, rows: int, width: int, device: torch.device) -> SamplingRows:
        """Rows to be filled by ``copy_``."""
        return cls.of([0] * rows, [Sampling(1.0, 1.0, width, 1)] * rows, width, device)

    def copy_(self, other: SamplingRows) -> None:
        """Take over the values of as many other rows, in place."""
        for mine, new in (
            (self.seeds, other.seeds),
            (self.temperature, other.temperature),
            (self.top_k, other.top_k),
            (self.top_p, other.top_p),
        ):
            mine.copy_(new)

    def head(self, count: int) -> SamplingRows:
        """The first rows, as views."""
        return SamplingRows(
            self.seeds[:count], self.temperature[:count], self.top_k[:count], self.top_p[:count], self.width
        )

    def select(self, indices: Tensor) -> SamplingRows:
        """The given rows, in that order."""
        return SamplingRows(
            self.seeds[indices], self.temperature[indices], self.top_k[indices], self.top_p[indices], self.width
        )


def sample(logits: Tensor, rows: SamplingRows, position: Tensor) -> Tensor:
    """Token ids [B] drawn from float32 logits [B, V] for completion position ``position`` (0-d int64, from 0).

    Ids with a logit of -inf are never drawn as long as one is finite.
    """
    ids = _ranked_ids(logits, rows.width)
    scaled = logits.gather(1, ids).double() / rows.temperature[:, None]
    kept = torch.arange(rows.width, device=logits.device) < rows.top_k[:, None]
    probabilities = scaled.masked_fill(~kept, float("-inf")).softmax(dim=1)
    kept &= probabilities.cumsum(dim=1) - probabilities < rows.top_p[:, None]
    noisy = scaled + gumbel(rows.seeds[:, None], position, ids)
    return ids.gather(1, noisy.masked_fill(~kept, float("-inf")).argmax(dim=1, keepdim=True))[:, 0]


def gumbel(seeds: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, for every id; shapes broadcast."""
    return -torch.log(-torch.log(uniform(seeds, position, ids)))


def uniform(seeds: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, on a grid of 2^-53: a hash of seed, position and id."""
    hashed = _mix(_mix(seeds + (position + 1) * _INCREMENT) + (ids + 1) * _INCREMENT)
    return (_shift(hashed, 11).double() + 0.5) * 2.0**-53


def chosen_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Natural-log probabilities [B] of ``ids`` [B] under the softmax of float32 logits [B, V], before any filter."""
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=1)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MULTIPLIERS[0]
    state = (state ^ _shift(state, 27)) * _MULTIPLIERS[1]
    return state ^ _shift(state, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of 64-bit words (torch's own keeps the sign)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _ranked_ids(logits: Tensor, width: int) -> Tensor:
    """Ids [B, width] by falling logit, equal logits by rising id.

    Float bits, made monotonic as integers, share a 64-bit key with the id: keys never tie.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (_LOW_32 - ids)
    return _LOW_32 - (keys.topk(width, dim=1).values & _LOW_32)
