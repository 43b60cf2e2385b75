"""Adapters on their way to vLLM: it takes them from a directory only, so each version gets a fresh one in memory.

A version is written once, read once, and its directory deleted when the version goes. /dev/shm is memory; where there
is none, the temporary directory serves.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trinity_vlm.engine.adapter_files import LockedFolder, peft_files, write_adapter

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


def delta_size(state: Mapping[str, Tensor], alpha: float) -> float:
    """An upper bound of the root mean square of the largest layer delta: |B| |A| scaling / sqrt(out in)."""
    sizes = [0.0]
    for key, down in state.items():
        if key.endswith(_DOWN):
            up = state[key.removesuffix(_DOWN) + _UP]
            scale = alpha / down.shape[0] / (up.shape[0] * down.shape[1]) ** 0.5
            sizes.append(float(down.float().norm() * up.float().norm()) * scale)
    return max(sizes)
