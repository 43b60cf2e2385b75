"""How the language model's layers run in an update: compiled or not, activations kept or made again.

It acts inside ``arranged`` only, through the layers' own ``forward`` attribute: generation with the same model, its
caches and captured graphs never meet it. What a layer recomputes in the backward pass, after the block, runs as
arranged too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class DecoderLayers:
    """The layers of one model, in order.

    num_recomputed: of the first so many layers only the input is kept for the backward pass
    low_precision: multiply with float32 adapters as with the model's own weights, in its dtype
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._compiled: Callable[..., Any] | None = None
        self.num_recomputed = 0
        self.low_precision = False

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def is_compiled(self) -> bool:
        """Whether ``compile`` was called."""
        return self._compiled is not None

    def compile(self, backend: str) -> None:
        """One compilation serves all layers and lengths; recomputing stays outside and may be switched at any time."""
        self._compiled = torch.compile(_run, backend=backend, dynamic=True)

    @contextmanager
    def arranged(self, compiled: bool) -> Iterator[None]:
        """Within the block the model's forward pass runs its layers as arranged, as they are compiled if ``compiled``.

        Each kind of batch (with or without a mask, one row or several) would be a compilation of its own.
        """
        keeping = partial(self._call, self._compiled if compiled and self._compiled is not None else _run)
        # Nothing random happens in a layer: a run refuses dropout.
        recomputing = partial(checkpoint, keeping, use_reentrant=False, preserve_rng_state=False)
        for index, layer in enumerate(self._layers):
            # transformers' own checkpointing would be part of what is compiled, in some versions
            layer.gradient_checkpointing = False
            layer.forward = partial(recomputing if index < self.num_recomputed else keeping, layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _call(self, run: Callable[..., Any], layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if run is not _run and not hidden.requires_grad:
            # Frozen embeddings would make the first layer a special case with a compilation of its own.
            hidden = hidden.detach().requires_grad_()
        if not self.low_precision or hidden.dtype == torch.float32:
            return run(layer, hidden, *args, **kwargs)
        with torch.autocast(hidden.device.type, hidden.dtype):
            return run(layer, hidden, *args, **kwargs)


def _run(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
