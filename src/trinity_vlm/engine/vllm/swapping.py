"""Whole weights instead of adapters: every language-model weight is written over vLLM's, as a trainer without adapters
would. For comparison with serving two adapters (the paper swaps "weights into the rollout engine as needed", A.2).

    trainer: W + D, layer by layer --> a buffer that both processes see --> vLLM's worker copies it over its weights
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trinity_vlm.ema import LowRank
from trinity_vlm.engine.vllm.sharing import Region, match_regions, named_weights, shared_buffer
from trinity_vlm.errors import EngineError

_BUFFER_BYTES = 2**30
_VISION = "model.visual."

Call = Callable[..., Awaitable[Sequence[object]]]
# Of the worker's call: vLLM's parameter, first row, rows, first element in the buffer.
Part = tuple[str, int, int, int]


class WeightWriter:
    """Writes weights of ``model`` over those of a vLLM worker; ``call`` is vLLM's ``collective_rpc``.

    Use ``open``. All transfers go through one buffer of 1 GiB, or as large as the largest weight if that is more.
    """

    def __init__(self, call: Call, model: nn.Module, regions: Mapping[str, Region], buffer: Tensor) -> None:
        self._call = call
        self._model = model
        self._regions = regions
        self._buffer = buffer

    @classmethod
    async def open(cls, call: Call, model: nn.Module, folder: Path) -> WeightWriter:
        """For all weights but the vision tower's; on a CPU the buffer is a file in ``folder``.

        Raises EngineError when vLLM holds a weight in a layout of its own.
        """
        weights = {name: weight for name, weight in named_weights(model).items() if not name.startswith(_VISION)}
        (shapes,) = await call("trinity_shapes")
        assert isinstance(shapes, dict)
        regions = match_regions(
            {name: tuple(weight.shape) for name, weight in weights.items()},
            {name: tuple(shape) for name, shape in shapes.items()},
        )
        missing = sorted(weights.keys() - regions.keys())
        if missing:
            raise EngineError(
                f"vLLM holds {len(missing)} of {len(weights)} weights in a layout of its own, for example "
                f"{missing[0]}; weights of this model can't be swapped, adapters can"
            )
        some = next(iter(weights.values()))
        sizes = [weight.numel() for weight in weights.values()]
        size = max(*sizes, min(sum(sizes), _BUFFER_BYTES // some.element_size()))
        buffer, handle = shared_buffer(size, some.dtype, some.device, folder)
        await call("trinity_open_buffer", args=(handle,))
        return cls(call, model, regions, buffer)

    async def write(self, added: Mapping[str, LowRank]) -> None:
        """Base weights plus ``added``, by plain name, over vLLM's."""
        unknown = added.keys() - self._regions.keys()
        if unknown:
            raise EngineError(f"an adapter changes {len(unknown)} weights the model lacks, for example {min(unknown)}")
        weights = named_weights(self._model)
        for names in _fitting({name: weights[name].numel() for name in self._regions}, self._buffer.numel()):
            parts = list(self._fill((name, weights[name], added.get(name)) for name in names))
            if self._buffer.is_cuda:
                torch.cuda.synchronize(self._buffer.device)
            await self._call("trinity_take", args=(parts,))

    @torch.no_grad()
    def _fill(self, weights: Iterable[tuple[str, Tensor, LowRank | None]]) -> Iterator[Part]:
        offset = 0
        for name, weight, delta in weights:
            merged = weight if delta is None else _sum(weight, delta)
            self._buffer[offset : offset + weight.numel()].copy_(merged.flatten())
            region = self._regions[name]
            yield region.name, region.start, region.rows, offset
            offset += weight.numel()


def _sum(weight: Tensor, delta: LowRank) -> Tensor:
    """W + D, in float32 and rounded once to the weight's dtype."""
    factors = LowRank(delta.left.to(weight.device), delta.right.to(weight.device))
    return (weight.float() + factors.product()).to(weight.dtype)


def _fitting(sizes: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """The names in order, in groups whose sizes sum up to ``room`` at most; each fits alone."""
    group: list[str] = []
    taken = 0
    for name, size in sizes.items():
        if group and taken + size > room:
            yield group
            group, taken = [], 0
        group.append(name)
        taken += size
    if group:
        yield group
