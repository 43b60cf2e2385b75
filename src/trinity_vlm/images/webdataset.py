"""WebDataset tars: a unit is one tar; its images are indexed by one pass over the headers and read by offset.

Only members with an image extension are read: labels beside them (``.json``, ``.txt``, ``.cls``) stay closed.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from functools import partial
from typing import BinaryIO

from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import EXTENSIONS, BadImage
from trinity_vlm.images.files import is_hidden
from trinity_vlm.images.source import Row, Unit, raise_bad
from trinity_vlm.images.storage import Storage


def tar_units(storage: Storage, relatives: Sequence[str], source: str) -> list[Unit]:
    """One unit per tar; reads the first header of each.

    Raises ImageSourceError for a file that is no plain (uncompressed) tar.
    """
    units: list[Unit] = []
    for relative in relatives:
        try:
            with storage.open(relative) as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(0)
                tarfile.open(fileobj=stream, mode="r:").close()
        except (OSError, tarfile.TarError) as error:
            raise ImageSourceError(
                f"images.source={source!r}: {relative} is not a readable tar: {error}; "
                "compressed tars must be unpacked first"
            ) from error
        units.append(Unit(f"{relative}:{size}", source, partial(_load, storage, relative)))
    return units


def _load(storage: Storage, relative: str) -> list[Row]:
    try:
        with storage.open(relative) as stream:
            return _index(storage, relative, stream)
    except (OSError, tarfile.TarError) as error:
        raise BadImage("unreadable_unit", f"{relative}: {error}") from error


def _index(storage: Storage, relative: str, stream: BinaryIO) -> list[Row]:
    """Rows of all image members; what follows a damaged header becomes one row that is counted as bad."""
    rows: list[Row] = []
    damaged = False
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        try:
            for member in archive:
                is_image = os.path.splitext(member.name)[1].lower() in EXTENSIONS and not is_hidden(member.name)
                if member.isfile() and is_image:
                    read = partial(_read_member, storage, relative, member.offset_data, member.size)
                    rows.append(Row(f"{relative}#{member.name}", read))
        except tarfile.ReadError:
            damaged = True
        stream.seek(archive.offset)
        damaged = damaged or stream.read(tarfile.BLOCKSIZE).strip(b"\0") != b""
    if damaged:
        bad = BadImage("damaged_archive", f"{relative} can't be read to its end")
        rows.append(Row(f"{relative}#damaged", partial(raise_bad, bad)))
    return rows


def _read_member(storage: Storage, relative: str, offset: int, size: int) -> bytes:
    try:
        with storage.open(relative) as stream:
            stream.seek(offset)
            return stream.read(size)
    except OSError as error:
        raise BadImage("unreadable_file", str(error)) from error
