"""Token log-probabilities without a [tokens, vocabulary] tensor of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 128 * 2**20


def token_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    num_rows: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Natural-log probabilities [N], float32, of ``token_ids`` [N] given the hidden states [N, H] that predict them.

    ``logits_of`` maps [n, H] to float32 logits [n, ``num_rows``]. It runs on chunks of at most ``chunk_bytes`` of
    logits. Under autograd several chunks run again in the backward pass: one is the peak of extra memory.
    """
    size = max(1, chunk_bytes // (4 * num_rows))
    parts = []
    for chunk, ids in zip(hidden.split(size), token_ids.split(size), strict=True):
        if torch.is_grad_enabled() and len(hidden) > size:
            parts.append(checkpoint(_chunk, chunk, ids, logits_of, use_reentrant=False))
        else:
            parts.append(_chunk(chunk, ids, logits_of))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def _chunk(hidden: Tensor, ids: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    logits = logits_of(hidden)
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=1)
