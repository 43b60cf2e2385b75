"""Key-value caches for decoding: one that grows in place, and one of fixed shape for captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from trinity_vlm.backbone import Backbone

_GROWTH = 128
_CACHE_SHARE = 0.4


class GrowingLayer(DynamicLayer):
    """Full attention over a buffer with room to spare: a step writes one column instead of copying all of them."""

    keys: Any
    values: Any

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, heads, n, head_dim]; returns views of everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states[:, :, :0]
            self.values = value_states[:, :, :0]
            self._key_buffer, self._value_buffer = key_states[:, :, :0], value_states[:, :, :0]
        length = self.keys.shape[2]
        total = length + key_states.shape[2]
        if total > self._key_buffer.shape[2]:
            self._key_buffer = _enlarged(self.keys, total + _GROWTH)
            self._value_buffer = _enlarged(self.values, total + _GROWTH)
        self._key_buffer[:, :, length:total] = key_states
        self._value_buffer[:, :, length:total] = value_states
        self.keys, self.values = self._key_buffer[:, :, :total], self._value_buffer[:, :, :total]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep (or repeat) the given rows."""
        length = self.keys.shape[2]
        self._key_buffer, self._value_buffer = self._key_buffer[indices], self._value_buffer[indices]
        self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]


def growing_cache(config: Any) -> DynamicCache:
    """The model's own dynamic cache with its full-attention layers replaced; other kinds of layers stay."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_tokens(backbone: Backbone) -> int:
    """Tokens whose keys and values may be held at once; 0 on a CPU: no limit.

    A fixed share of what the weights leave of the GPU, not of what is free just now: batches must not depend on it.
    """
    if backbone.device.type != "cuda":
        return 0
    model: Any = backbone.model
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * backbone.dtype.itemsize
    weights = sum(p.numel() * p.element_size() for p in backbone.model.parameters())
    total = torch.cuda.get_device_properties(backbone.device).total_memory
    return int(_CACHE_SHARE * (total - weights) / per_token)


def layer_tensors(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, [B, heads, L, head_dim] each."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def _enlarged(tensor: Tensor, capacity: int) -> Tensor:
    batch, heads, length, width = tensor.shape
    grown = tensor.new_empty(batch, heads, capacity, width)
    grown[:, :, :length] = tensor
    return grown


class SlotLayer(CacheLayerMixin):
    """Full attention over buffers of fixed shape [B, heads, L, head_dim]; ``slot`` [1] says which column a step writes.

    A step sees all L columns: the attention mask tells which of them count.
    """

    is_sliding = False
    is_compileable = True
    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, slot: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slot = keys, values, slot
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values [B, heads, 1, head_dim] into the slot."""
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns a mask covers."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Unknown on the host: positions and mask are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """L."""
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class Arena:
    """Memory for the keys and values of all layers, reused as [B, heads, L, head_dim] for any B and L that fit."""

    def __init__(self, like: list[tuple[Tensor, Tensor]], cells: int) -> None:
        self.cells = cells
        self._shapes = [[(t.shape[1], t.shape[3]) for t in pair] for pair in like]
        self._flat = [[t.new_zeros(cells * t.shape[1] * t.shape[3]) for t in pair] for pair in like]

    def cache(self, batch: int, length: int, slot: Tensor) -> Cache:
        """All layers seen as ``batch`` rows of ``length`` columns; ``batch * length`` is at most ``cells``."""
        layers: list[Any] = []
        for flats, shapes in zip(self._flat, self._shapes, strict=True):
            keys, values = (
                flat[: batch * heads * length * width].view(batch, heads, length, width)
                for flat, (heads, width) in zip(flats, shapes, strict=True)
            )
            layers.append(SlotLayer(keys, values, slot))
        return Cache(layers=layers)
