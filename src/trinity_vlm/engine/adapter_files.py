"""Adapters as files: how engines that take them from a directory only are handed a version.

state (PEFT keys) ──scaling folded in, ranks made equal──▶ DIR/adapter_model.safetensors, DIR/adapter_config.json
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trinity_vlm.errors import EngineError

_FOLDER = "trinity-vlm-adapters-"
_LOCK = "lock"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")


class LockedFolder:
    """A fresh directory that goes when this process ends, however it ends.

    lock: a file in it that this process holds locked as long as it lives, so that what killed runs left behind is told
        from what is in use: every new folder first removes the abandoned ones of ``parent``
    Raises OSError when nothing can be written in ``parent``.
    """

    def __init__(self, parent: Path) -> None:
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
        self.path.chmod(0o755)  # servers may run as other users
        self.lock = self.path / _LOCK
        unlocked = self.lock.with_suffix(".new")
        self._held = unlocked.open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        unlocked.rename(self.lock)  # appears under its name only when it is locked already
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: str) -> None:
    """Write what ``peft_files`` made to ``folder``, which appears whole or not at all."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), partial / "adapter_model.safetensors")
    (partial / "adapter_config.json").write_text(config)
    partial.rename(folder)


def peft_files(name: str, state: Mapping[str, Tensor], alpha: float) -> tuple[dict[str, Tensor], str]:
    """Tensors and ``adapter_config.json`` of one adapter, with one rank R for all layers and a scaling of 1.

    state: ``base_model.model.<layer>.lora_A.weight`` [r, in] and ``.lora_B.weight`` [out, r] per layer
    alpha: the adapter's own; it scales a layer of rank r by alpha / r
    Servers know one rank and one scaling per adapter: each B is multiplied by its layer's scaling, and both factors are
    filled up with zeros to R, the largest rank.
    """
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor_name, tensor in state.items():
        layer, _, part = tensor_name.removesuffix(".weight").removeprefix(_PREFIX).rpartition(".")
        layers[layer][part] = tensor
    broken = [layer for layer, pair in layers.items() if set(pair) != set(_PARTS)]
    if broken or not layers:
        raise EngineError(
            f"state of adapter {name!r}: expected lora_A and lora_B of every layer, not so for {broken[:3] or 'any'}"
        )
    rank = max(pair["lora_A"].shape[0] for pair in layers.values())
    tensors = {}
    for layer, pair in layers.items():
        down, up = pair["lora_A"], pair["lora_B"]
        missing = rank - down.shape[0]
        up = up * (alpha / down.shape[0])
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = torch.nn.functional.pad(down, (0, 0, 0, missing)).contiguous()
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = torch.nn.functional.pad(up, (0, missing)).contiguous()
    return tensors, json.dumps(_config(list(layers), rank), indent=1)


def _config(layers: list[str], rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_FOLDER}*/{_LOCK}"):
        with suppress(OSError), lock.open("r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
