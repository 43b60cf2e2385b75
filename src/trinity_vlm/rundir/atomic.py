"""Files and folders that are either wholly there or not there, whatever kills the process that writes them.

A write goes to a name that starts with ``TEMPORARY_PREFIX`` in the same folder, is fsynced, renamed, and the folder is
fsynced. What a killed process left behind is recognised by that prefix; only the holder of the run's lock removes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_vlm.errors import RunDirectoryError

TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def names_path(path: Path) -> Iterator[None]:
    """Give every OSError raised inside the path it is about: those of write and fsync come without one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError raised inside into a RunDirectoryError that gives the path, the cause and the free space."""
    try:
        with names_path(path):
            yield
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename}: {error.strerror or error}; {free_space(path)} on that disk"
        ) from error


def write_new_file(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data`` and fsync it. Raises OSError (with its filename set), also when it exists."""
    with names_path(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make renames, creations and deletions inside ``path`` durable. Raises OSError (with its filename set)."""
    with names_path(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees the whole former or the whole new content.

    Raises OSError (with its filename set) and removes its temporary when the disk is full.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    remove(temporary)
    try:
        write_new_file(temporary, data)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError:
        remove(temporary)
        raise


def remove(path: Path) -> None:
    """Delete a file or a folder tree if it is there; what can't be deleted is left for the next clean-up."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_folder_atomically(path: Path) -> None:
    """Delete a folder tree; a process killed half-way leaves a temporary, never a folder with some files missing."""
    doomed = path.with_name(f"{TEMPORARY_PREFIX}removed-{path.name}")
    remove(doomed)
    os.replace(path, doomed)
    remove(doomed)


def remove_temporaries(folder: Path) -> None:
    """Delete what a killed writer left in ``folder``. Call it only as the folder's single writer."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(TEMPORARY_PREFIX):
                remove(path)


def free_space(path: Path) -> str:
    """Free bytes of the disk that holds ``path`` (or its nearest existing parent), for an error text."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return f"{format_bytes(shutil.disk_usage(path).free)} free"
    except OSError:
        return "free space unknown"


def format_bytes(number: int) -> str:
    """A byte count for people: ``1536 -> '1.5 KiB'``."""
    size = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
