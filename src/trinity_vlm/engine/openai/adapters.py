"""Adapters on their way to servers: a directory that vLLM loads at run time, under a name that fixes its content.

A name such as ``policy-v12-3fa9c1d0`` holds the version and a digest of the tensors, so that no server ever answers
from other weights than asked for: not after an update (servers key their prefix caches by name), not in a run that was
resumed from an earlier step.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trinity_vlm.engine.adapter_files import LockedFolder, peft_files, write_adapter
from trinity_vlm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter on disk: what servers call it, and where they find it."""

    served_name: str
    path: str


class AdapterShelf:
    """The current version of every adapter, in a directory of its own that goes when the process ends.

    folder: where the servers can read it under the same path; a RAM disk when they run on this machine
    Raises ConfigError, naming ``key``, when nothing can be written there.
    """

    def __init__(self, folder: str, key: str) -> None:
        try:
            self._folder = LockedFolder(Path(folder))
        except OSError as error:
            raise ConfigError(
                f"{key}.adapter_dir={folder!r}: can't write there ({error.strerror}); name an existing directory that "
                "the servers see under the same path"
            ) from None
        self.current: dict[str, SavedAdapter] = {}
        self.close = self._folder.close

    def put(self, name: str, version: int, state: Mapping[str, Tensor], alpha: float) -> SavedAdapter:
        """Write ``state`` as the current version of ``name``. Raises EngineError for keys that are not LoRA pairs."""
        tensors, config = peft_files(name, state, alpha)
        served = f"{name}-v{version}-{digest(tensors)}"
        path = self._folder.path / served
        if not path.exists():
            write_adapter(path, tensors, config)
        self.current = {**self.current, name: SavedAdapter(served, str(path))}
        return self.current[name]

    def drop_old(self) -> None:
        """Delete the directories of all but the current versions."""
        kept = {saved.path for saved in self.current.values()}
        for folder in self._folder.path.iterdir():
            if folder.is_dir() and str(folder) not in kept:
                shutil.rmtree(folder)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Eight hexadecimal digits of the tensors' names and values."""
    hasher = hashlib.blake2b(digest_size=4)
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
