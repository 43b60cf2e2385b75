"""Where shards lie: a local folder or a hub repository, behind one call that opens a file below a root."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from trinity_vlm.images.decode import BadImage


class Storage(Protocol):
    """Files below one root, named by relative paths with forward slashes."""

    def open(self, relative: str) -> BinaryIO:
        """Open for seekable binary reading. Raises OSError."""
        ...

    def contains(self, relative: str) -> bool:
        """Whether a path, links followed, stays below the root."""
        ...


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """A folder; ``root`` is absolute and resolved."""

    root: Path

    def open(self, relative: str) -> BinaryIO:
        return (self.root / relative).open("rb")

    def contains(self, relative: str) -> bool:
        return (self.root / relative).resolve().is_relative_to(link_boundary(self.root))


@dataclass(frozen=True, slots=True)
class RemoteStorage:
    """A folder of an fsspec file system, for example huggingface_hub's HfFileSystem."""

    filesystem: Any
    root: str

    def open(self, relative: str) -> BinaryIO:
        stream: BinaryIO = self.filesystem.open(posixpath.join(self.root, relative), "rb")
        return stream

    def contains(self, relative: str) -> bool:
        return posixpath.normpath(posixpath.join(self.root, relative)).startswith(f"{self.root}/")


def link_boundary(root: Path) -> Path:
    """The folder that links below ``root`` must not leave: ``root``, or for a snapshot in the hub's local cache, whose
    files are links into a sibling folder, the cached repository."""
    return root.parent.parent if root.parent.name == "snapshots" else root


def read_file(storage: Storage, relative: str) -> bytes:
    """All bytes of an image file that a shard points to. Raises BadImage naming what went wrong."""
    if not storage.contains(relative):
        raise BadImage("outside_root", relative)
    try:
        with storage.open(relative) as stream:
            return stream.read()
    except FileNotFoundError as error:
        raise BadImage("missing_file", relative) from error
    except OSError as error:
        raise BadImage("unreadable_file", str(error)) from error
