"""One copy of the base weights on a GPU: the trainer's frozen parameters become views of vLLM's.

    vLLM's worker --handles of its weights--> this process: map names, compare bit for bit, view, free the own copy

    trainer                                        vLLM
    model.language_model.layers.0.self_attn.q_proj ┐
    model.language_model.layers.0.self_attn.k_proj ├ language_model.model.layers.0.self_attn.qkv_proj, by rows
    model.language_model.layers.0.self_attn.v_proj ┘
    model.visual.blocks.0.attn.qkv                   visual.blocks.0.attn.qkv

What vLLM holds under another layout is not equal and stays the trainer's own: a wrong mapping costs memory, nothing
else. Views need CUDA's plain caching allocator on vLLM's side (no expandable segments, no sleep mode).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_PEFT = "base_model.model."
_WRAPPED = ".base_layer."
_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)
# vLLM's layer that holds the rows of these, one behind the other.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_STACK_OF = {part: stack for stack, parts in _STACKED.items() for part in parts}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROOM_LEFT = 2**30  # bytes of the GPU that copies never take
_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the device's number, which differs between the two processes

Shape = tuple[int, ...]
Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Region:
    """Where vLLM holds a parameter: rows ``start`` .. ``start + rows`` of its parameter ``name``.

    Example: k_proj.weight [1024, 4096] is Region("...qkv_proj.weight", 4096, 1024) of [6144, 4096].
    """

    name: str
    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """The region of vLLM's parameter, as a view."""
        return tensor[self.start : self.start + self.rows]


@dataclass(frozen=True, slots=True)
class SharingReport:
    """Bytes of frozen parameters that are views of vLLM's now, bytes that stayed, and one that stayed ('' for none)."""

    shared: int
    kept: int
    kept_example: str = ""

    def __str__(self) -> str:
        kept = f", for example {self.kept_example}" if self.kept_example else ""
        return f"{self.shared / 2**30:.2f} GiB of base weights shared with vLLM, {self.kept / 2**30:.2f} GiB kept{kept}"


def plain_name(parameter: str) -> str:
    """A parameter's name without what adapters add to it: ``base_model.model.`` and ``.base_layer``."""
    return parameter.removeprefix(_PEFT).replace(_WRAPPED, ".")


def match_regions(trainer: Mapping[str, Shape], engine: Mapping[str, Shape]) -> dict[str, Region]:
    """Per parameter of the trainer the region of vLLM's that should hold it; those without one are left out.

    trainer, engine: shapes by plain name. vLLM may pad rows (vocabulary) and flatten all but the first dimension.
    """
    regions = {}
    for name, shape in trainer.items():
        found, start = _place(name, trainer)
        if found in engine and shape and _holds(engine[found], shape, start):
            regions[name] = Region(found, start, shape[0])
    return regions


def _place(name: str, shapes: Mapping[str, Shape]) -> tuple[str, int]:
    """vLLM's name of the parameter, and its first row there."""
    found = next((new + name.removeprefix(old) for old, new in _PREFIXES if name.startswith(old)), name)
    layer, _, kind = name.rpartition(".")
    parent, _, own = layer.rpartition(".")
    stack = _STACK_OF.get(own)
    if stack is None:
        return found, 0
    start = 0
    for part in _STACKED[stack]:
        if part == own:
            break
        start += shapes.get(f"{parent}.{part}.{kind}", (0,))[0]
    return found.replace(f".{own}.", f".{stack}."), start


def _holds(whole: Shape, part: Shape, start: int) -> bool:
    same_width = math.prod(whole[1:]) == math.prod(part[1:])
    return bool(whole) and start + part[0] <= whole[0] and same_width


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by plain name, without those of adapters."""
    return {
        plain_name(name): parameter.data.as_subclass(Tensor)
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }


def export_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Handles by which another process sees the same GPU memory; the caller keeps the tensors alive. Tensors on a CPU
    go as copies."""
    return pickle.dumps({name: _handle(tensor) for name, tensor in tensors.items()})


def _handle(tensor: Tensor) -> Handle:
    if tensor.is_cuda:
        handle: Handle = reduce_tensor(tensor)
        return handle
    return _itself, (tensor.clone(),)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def shared_buffer(size: int, dtype: torch.dtype, device: torch.device, folder: Path) -> tuple[Tensor, bytes]:
    """A buffer [size] and its handle for ``import_tensors`` in another process: GPU memory, or a file in ``folder``."""
    if device.type == "cuda":
        buffer = torch.empty(size, dtype=dtype, device=device)
        return buffer, export_tensors({"buffer": buffer})
    place = (str(folder / "buffer"), size, dtype)
    return _mapped(*place), pickle.dumps({"buffer": (_mapped, place)})


def _mapped(path: str, size: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


def import_tensors(handles: bytes, device: torch.device) -> dict[str, Tensor]:
    """The tensors behind ``handles``, which came from a process of our own, as ``device`` of this process."""
    received: dict[str, Handle] = pickle.loads(handles)
    return {name: _rebuild(function, arguments, device) for name, (function, arguments) in received.items()}


def _rebuild(function: Callable[..., Tensor], arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    if function is rebuild_cuda_tensor:
        index = torch.cuda.current_device() if device.index is None else device.index
        arguments = (*arguments[:_DEVICE_ARGUMENT], index, *arguments[_DEVICE_ARGUMENT + 1 :])
    return function(*arguments)


class SharedWeights:
    """The frozen parameters of ``model`` that are views of ``weights``, vLLM's parameters by plain name."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        frozen = {plain_name(n): p for n, p in model.named_parameters() if not p.requires_grad and ".lora_" not in n}
        regions = match_regions(
            {name: tuple(parameter.shape) for name, parameter in frozen.items()},
            {name: tuple(weight.shape) for name, weight in weights.items()},
        )
        views: dict[str, Tensor] = {}
        for name, region in regions.items():
            view = region.of(weights[region.name])
            if _same_bits(view, frozen[name]):
                views[name] = view
        for name, view in views.items():
            frozen[name].data = view.view(frozen[name].shape)
        kept = {name: parameter.nbytes for name, parameter in frozen.items() if name not in views}
        self._views = [frozen[name] for name in views]
        self._left: list[tuple[nn.Parameter, torch.device]] = []
        shared = sum(parameter.nbytes for parameter in self._views)
        self.report = SharingReport(shared, sum(kept.values()), max(kept, key=lambda name: kept[name], default=""))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def take_back(self, alive: bool) -> None:
        """Before vLLM ends, and its memory with it: every view becomes a copy of the trainer's own again.

        Where the GPU has no room for copies beside vLLM they wait in host memory for ``settle``. With vLLM dead
        (``alive`` false) nothing is read any more: the parameters are left empty, so that using them is an error.
        """
        self._left = [(parameter, parameter.device) for parameter in self._views]
        self._views = []
        for parameter, _ in self._left:
            parameter.data = _copy(parameter.data) if alive else parameter.data.new_empty(0)
        if alive and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies must be done before vLLM lets go of what they read

    def settle(self) -> None:
        """After vLLM ended: bring what waits in host memory back to its device."""
        for parameter, device in self._left:
            parameter.data = parameter.data.to(device)
        self._left = []


def _same_bits(view: Tensor, own: Tensor) -> bool:
    if view.dtype != own.dtype or view.device != own.device or not (view.is_contiguous() and own.is_contiguous()):
        return False
    bits = _BITS[own.element_size()]
    return torch.equal(view.flatten().view(bits), own.detach().flatten().view(bits))


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cuda" and torch.cuda.mem_get_info(tensor.device)[0] < tensor.nbytes + _ROOM_LEFT:
        return tensor.cpu()
    return tensor.clone()
