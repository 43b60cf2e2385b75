"""Image features once per distinct image, in place of the model's own ``get_image_features``.

For families whose vision tower takes flat patches and a grid (Qwen-VL). A frozen tower runs without gradients, one
image at a time, so that an image's features don't depend on its batch-mates, and the features are kept in a bounded
cache: tower and merger never change in adapter training. A trained tower runs once per distinct image of the batch.
Other families take the plain path.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_vlm.backbone.batching import stack_image_inputs
from trinity_vlm.backbone.encoding import BoundedCache, EncodedPrompt

FEATURE_CACHE_BYTES = 2 * 2**30  # an 8B model's image of 1,024 tokens takes 34 MB


@dataclass(frozen=True, slots=True)
class _Features:
    """Of one image: merged tokens [n, H], and as many per tapped tower layer (deepstack)."""

    tokens: Tensor
    deepstack: tuple[Tensor, ...] | None

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, *(self.deepstack or ())))


def supports_feature_cache(inner: Any) -> bool:
    """Whether the family's ``get_image_features`` takes flat patches and their grids."""
    method = getattr(inner, "get_image_features", None)
    return hasattr(inner, "visual") and method is not None and "image_grid_thw" in inspect.signature(method).parameters


class VisionFeatures:
    """Replaces ``inner.get_image_features``; outside ``serving`` the original answers."""

    def __init__(self, inner: Any, *, frozen: bool) -> None:
        self._original: Any = inner.get_image_features
        self._frozen = frozen
        self._cache: BoundedCache[_Features] = BoundedCache(FEATURE_CACHE_BYTES, lambda f: f.num_bytes)
        self._rows: Sequence[EncodedPrompt] | None = None
        self._device = next(inner.parameters()).device
        self._output_type: type | None = None
        self._joined_layers = False  # transformers before 5.20 joins the images of a deepstack layer
        inner.get_image_features = self._answer

    @contextmanager
    def serving(self, prompts: Sequence[EncodedPrompt]) -> Iterator[dict[str, Tensor]]:
        """Within the block the model's forward gets the features of these rows; yields the inputs to pass to it."""
        rows = [p for p in prompts if p.image_key is not None]
        if not rows:
            yield {}
            return
        self._rows = rows
        grids = torch.cat([p.image_inputs["image_grid_thw"] for p in rows]).to(self._device)
        try:
            yield {"pixel_values": torch.empty(0, device=self._device), "image_grid_thw": grids}
        finally:
            self._rows = None

    def _answer(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any) -> Any:
        if self._rows is None:
            return self._original(pixel_values, image_grid_thw, **kwargs)
        distinct = {str(p.image_key): p for p in self._rows}
        if self._frozen:
            found = {k: self._cache.get(k, lambda p=p: self._compute([p])[0]) for k, p in distinct.items()}  # type: ignore[misc]
        else:
            found = dict(zip(distinct, self._compute(list(distinct.values())), strict=True))
        rows = [found[str(p.image_key)] for p in self._rows]
        fields: dict[str, Any] = {"pooler_output": tuple(f.tokens for f in rows)}
        if rows[0].deepstack is not None:
            layers = [list(layer) for layer in zip(*(f.deepstack or () for f in rows), strict=True)]
            fields["deepstack_features"] = [torch.cat(layer) for layer in layers] if self._joined_layers else layers
        assert self._output_type is not None
        return self._output_type(**fields)

    def _compute(self, prompts: Sequence[EncodedPrompt]) -> list[_Features]:
        inputs = {name: values.to(self._device) for name, values in stack_image_inputs(prompts).items()}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            out = self._original(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        self._output_type = type(out)
        sizes = [len(tokens) for tokens in out.pooler_output]
        layers = getattr(out, "deepstack_features", None)
        if layers:
            self._joined_layers = isinstance(layers[0], Tensor)
            layers = [layer.split(sizes) if self._joined_layers else layer for layer in layers]
        return [
            _Features(tokens, None if layers is None else tuple(layer[i] for layer in layers))
            for i, tokens in enumerate(out.pooler_output)
        ]
