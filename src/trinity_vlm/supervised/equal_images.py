"""The forward pass over many images of one size, without transformers' Python loops over images.

Two loops cost more than the mathematics of a small model: vision attention runs image by image when no flash-attention
package is there, and positions, features and placeholders are gathered per image and per row. Here all images of one
size go through the tower as the frames of one clip (Qwen-VL towers attend within a frame and repeat its positions, so
the numbers are the same), attention takes equal lengths as one batch, and rows pick their features by index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trinity_vlm.backbone import Backbone
from trinity_vlm.supervised.batches import PackedBatch, unpack

NAME = "flash_by_equal_lengths"
"""transformers hands packed images only to attention implementations whose name says flash."""

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which plans anew for every sequence length: seconds lost over batches of varying widths."""


def completion_logprobs(backbone: Backbone, packed: PackedBatch, adapter: str | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T] of the completion tokens and their mask [B, T], as ``Backbone.completion_logprobs``.

    In full-parameter mode, images of one size take the fast way.
    """
    with sdpa_kernel(_KERNELS):
        if adapter is None and not backbone.adapter_names and has_equal_images(packed):
            batch = unpack(packed, backbone.device, with_images=False)
            with _serving_equal_images(backbone, packed):
                return backbone.completion_logprobs(batch, None), batch.completion_mask
        batch = unpack(packed, backbone.device)
        return backbone.completion_logprobs(batch, adapter), batch.completion_mask


def has_equal_images(packed: PackedBatch) -> bool:
    """Whether the batch has images, all still and of one size, of a family with flat patches and grids."""
    grids = packed.image_inputs.get("image_grid_thw")
    if grids is None or set(packed.image_inputs) != {"pixel_values", "image_grid_thw"}:
        return False
    return bool((grids == grids[0]).all()) and int(grids[0, 0]) == 1


@contextmanager
def _serving_equal_images(backbone: Backbone, packed: PackedBatch) -> Iterator[None]:
    """Within the block the model's forward gets the rows' image features, computed here in one go with gradients."""
    inner: Any = backbone.model.base_model
    usual = inner.get_image_features
    pixels = packed.image_inputs["pixel_values"].to(backbone.device, non_blocking=True)
    grid = packed.image_inputs["image_grid_thw"]
    clip = torch.tensor([[len(grid), int(grid[0, 1]), int(grid[0, 2])]], device=backbone.device)
    index = torch.tensor([i for i in packed.image_of_row if i >= 0], device=backbone.device)

    def rows(features: Tensor) -> Tensor:
        return features.unflatten(0, (len(grid), -1))[index].flatten(0, 1)

    with _batched_vision_attention(inner.visual):
        out = usual(pixels, clip, return_dict=True)
    fields: dict[str, Any] = {"pooler_output": (rows(torch.cat(tuple(out.pooler_output))),)}
    if (layers := getattr(out, "deepstack_features", None)) is not None:
        joined = isinstance(layers[0], Tensor)  # before transformers 5.20 a layer's features come unsplit
        fields["deepstack_features"] = [rows(f) if joined else (rows(torch.cat(tuple(f))),) for f in layers]
    served = type(out)(**fields)
    inner.get_image_features = lambda *_, **__: served
    try:
        yield
    finally:
        inner.get_image_features = usual


@contextmanager
def _batched_vision_attention(tower: nn.Module) -> Iterator[None]:
    config: Any = tower.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def equal_lengths_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Full attention within each of the packed sequences; query, key, value [1, heads, N, D] -> [1, N, heads, D].

    ``cu_seq_lens_q``: [S + 1] boundaries; ``max_length_q``: the longest sequence. Unequal lengths go one by one.
    """
    assert cu_seq_lens_q is not None
    assert max_length_q is not None
    count, total = len(cu_seq_lens_q) - 1, query.shape[2]
    lengths = [max_length_q] * count if count * max_length_q == total else cu_seq_lens_q.diff().tolist()
    if len(set(lengths)) == 1:
        q, k, v = (t[0].unflatten(1, (count, max_length_q)).transpose(0, 1) for t in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    parts = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    outs = [scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling) for q, k, v in parts]
    return torch.cat(outs, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, equal_lengths_attention)
