"""Attention of a row that holds one prompt and several completions: plain causal kernels, no mask.

    row      | prompt | completion 1 | completion 2 | ...
    queries  |  prompt, completion 1 |  each further completion
    keys     |     the same tokens   |  prompt, then the completion's own: causal from the lower right corner

No query sees another completion, so values are those of separate rows; a mask over the whole row would cost the square
of its length in memory and, on a GPU, the fast kernels. The lengths travel through the model's forward as the keyword
argument ``segments``, so that layers recomputed in the backward pass get them too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "trinity_shared_rows"


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Lengths in tokens of a row's prompt and of each completion behind it (one at least).

    An object of its own, and not a tuple, so that compiled layers hand it on without looking at the numbers.
    """

    prompt: int
    completions: tuple[int, ...]


def take_segments(decoder: nn.Module) -> None:
    """Let the layers of a language model with sdpa attention take ``segments``; without them they compute as before."""
    for module in decoder.modules():
        if hasattr(module, "config"):
            config: Any = module.config
            config._attn_implementation = NAME


def shared_rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, Q, L, D], key and value [B, KV, L, D] -> [B, L, Q, D].

    ``segments``: of the row, L tokens in all; None: sdpa.
    """
    if segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return attend(query, key, value, segments, dropout, scaling), None


@torch.compiler.disable
def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, dropout: float, scaling: float | None
) -> Tensor:
    """[B, L, Q, D]. Kept out of compiled graphs, which would be specialised to the number of completions."""
    prompt, (first, *others) = segments.prompt, segments.completions
    queries = query.split([prompt + first, *others], dim=2)
    shared_keys, *keys = key.split([prompt, first, *others], dim=2)
    shared_values, *values = value.split([prompt, first, *others], dim=2)
    with _kernels(query):
        outputs = [
            _causal(q, torch.cat([shared_keys, k], dim=2), torch.cat([shared_values, v], dim=2), dropout, scaling)
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
    return torch.cat([out.transpose(1, 2) for out in outputs], dim=1)


def _kernels(query: Tensor) -> AbstractContextManager[None]:
    """Not cuDNN's, which newer versions of torch prefer on some GPUs: it plans anew for every length it meets."""
    if not query.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _causal(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """[B, Q, l, D]: the last query sees every key, each earlier one a key less.

    Key and value heads are repeated unless the flash kernel takes them as they are (half precision on a GPU).
    """
    grouped = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if not grouped:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, enable_gqa=grouped)


AttentionInterface.register(NAME, shared_rows_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
