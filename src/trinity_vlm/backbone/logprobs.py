"""Token log-probabilities without a [tokens, vocabulary] tensor of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Float32 logits made at once."""
TENSORS_PER_CHUNK = 3
"""Held at once of a chunk, in sizes of its float32 logits: their log-softmax, and both in the model's dtype."""


def token_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    num_rows: int,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Natural-log probabilities [N], float32, of ``token_ids`` [N] given the hidden states [N, H] that predict them.

    ``logits_of`` maps [n, H] to float32 logits [n, ``num_rows``]. It runs on chunks of at most ``chunk_bytes`` of
    logits. Under autograd several chunks run again in the backward pass: one is the peak of extra memory.
    """
    size = _chunk_size(hidden, num_rows, chunk_bytes)
    parts = []
    for chunk, ids in zip(hidden.split(size), token_ids.split(size), strict=True):
        if torch.is_grad_enabled() and len(hidden) > size:
            parts.append(checkpoint(_chunk, chunk, ids, logits_of, use_reentrant=False))
        else:
            parts.append(_chunk(chunk, ids, logits_of))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def frozen_head_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    banned: Tensor,
    chunk_bytes: int | None = None,
) -> Tensor:
    """As ``token_logprobs`` for the output layer ``weight`` [V, H], ``bias`` [V], which gets no gradient.

    ``banned``: ids that have no probability. A token's log-probability depends on its own hidden state alone, so the
    forward pass also forms d log p / d hidden [N, H], and the backward pass is one product: no logits are made twice.
    """
    size = _chunk_size(hidden, len(weight), chunk_bytes)
    return _FrozenHead.apply(hidden, token_ids, weight, bias, banned, size)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, token_ids: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor, size: int
    ) -> Tensor:
        values = hidden.new_zeros(len(hidden), dtype=torch.float32)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = F.linear(hidden[part], weight, bias).float().index_fill_(1, banned, float("-inf"))
            logprobs, ids = logits.log_softmax(dim=1), token_ids[part, None]
            del logits
            values[part] = logprobs.gather(1, ids)[:, 0]
            if slopes is not None:
                # d log p(y) / d logits is 1[y] - p, and 0 where the logit is a constant
                negative = logprobs.exp_().scatter_(1, ids, values[part, None].expm1())
                torch.mm(negative.index_fill_(1, banned, 0).to(weight.dtype), weight, out=slopes[part])
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * -grads[0][:, None]).to(slopes.dtype), None, None, None, None, None


def logit_bytes(device: torch.device, tokens: int, num_rows: int) -> int:
    """An estimate of what the log-probabilities of ``tokens`` tokens take at their peak."""
    return TENSORS_PER_CHUNK * min(CHUNK_BYTES[device.type], 4 * num_rows * tokens)


def _chunk_size(hidden: Tensor, num_rows: int, chunk_bytes: int | None) -> int:
    return max(1, (chunk_bytes or CHUNK_BYTES[hidden.device.type]) // (4 * num_rows))


def _chunk(hidden: Tensor, ids: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    logits = logits_of(hidden)
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=1)
