"""Adapters on their way to vLLM: it takes them from a directory only, so each version gets a fresh one in memory.

A version is written once, read once, and its directory deleted when the version goes. /dev/shm is memory; where there
is none, the temporary directory serves.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trinity_vlm.ema import LowRank
from trinity_vlm.engine.adapter_files import LockedFolder, peft_files, write_adapter
from trinity_vlm.engine.vllm.sharing import plain_name

_RAM_DISK = Path("/dev/shm")
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class AdapterFolder(LockedFolder):
    """A directory of adapter versions."""

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__(parent or (_RAM_DISK if os.access(_RAM_DISK, os.W_OK) else Path(tempfile.gettempdir())))
        self._numbers = itertools.count()

    def write(self, label: str, state: Mapping[str, Tensor], alpha: float, dtype: torch.dtype) -> Path:
        """The adapter as a PEFT directory that nothing else ever used. Raises EngineError for incomplete pairs."""
        tensors, config = peft_files(label, {name: tensor.float() for name, tensor in state.items()}, alpha)
        folder = self.path / f"{label}-{next(self._numbers)}"
        write_adapter(folder, {name: tensor.to(dtype) for name, tensor in tensors.items()}, config)
        return folder


def deltas(state: Mapping[str, Tensor], alpha: float) -> dict[str, LowRank]:
    """What an adapter's state (PEFT keys) adds to the weights, by their plain names; the layer's scaling folded in."""
    found = {}
    for key, down in state.items():
        if key.endswith(_DOWN):
            layer = key.removesuffix(_DOWN)
            found[f"{plain_name(layer)}.weight"] = LowRank(state[layer + _UP] * (alpha / down.shape[0]), down)
    return found


def delta_size(state: Mapping[str, Tensor], alpha: float) -> float:
    """An upper bound of the root mean square of the largest layer delta: |B| |A| scaling / sqrt(out in)."""
    sizes = (
        float(delta.left.float().norm() * delta.right.float().norm()) / math.prod(delta.shape) ** 0.5
        for delta in deltas(state, alpha).values()
    )
    return max(sizes, default=0.0)
