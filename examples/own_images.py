"""An image source of your own: the pictures of a zip archive, read without unpacking it.

    PICTURES_ZIP=photos.zip PYTHONPATH=examples trinity-vlm train tiny steps=5 images.source=own_images:zipped

A factory gets the ``images`` section and returns an ImageSource: units (opened, shuffled and shared among workers
as a whole) of rows (one image each, read when its turn comes). Skipping of broken pictures, shuffling, resizing and
exact resume come with it, as long as unit keys and uids are the same on every start.
"""

from __future__ import annotations

import os
import zipfile
from functools import partial
from pathlib import Path

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images import ImageSource, Row, Unit

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
ROWS_PER_UNIT = 64


def zipped(config: ImagesConfig) -> ImageSource:
    """The archive named by the environment variable PICTURES_ZIP; raises ImageSourceError without a readable one."""
    path = Path(os.environ.get("PICTURES_ZIP", ""))
    if not zipfile.is_zipfile(path):
        raise ImageSourceError(f"images.source={config.source!r}: PICTURES_ZIP={str(path)!r} is no zip archive")
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.lower().endswith(SUFFIXES))
    parts = [names[i : i + ROWS_PER_UNIT] for i in range(0, len(names), ROWS_PER_UNIT)]
    units = [Unit(f"{part[0]}:{len(part)}", path.name, partial(_rows, path, part)) for part in parts]
    return ImageSource(path.name, tuple(units))


def _rows(path: Path, names: list[str]) -> list[Row]:
    return [Row(f"{path.name}/{name}", partial(_read, path, name)) for name in names]


def _read(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)
