"""Image files of a folder tree, a glob or a list: sorted, by extension, never outside the root."""

from __future__ import annotations

import glob
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import EXTENSIONS
from trinity_vlm.images.source import Row, Unit, short_hash
from trinity_vlm.images.storage import link_boundary

logger = logging.getLogger(__name__)

MAX_FILES_PER_UNIT = 64
UNITS_BEFORE_GROUPING = 4096


@dataclass(slots=True)
class Listing:
    """Files below ``root`` by kind, as sorted relative paths with forward slashes.

    ignored counts the other files by suffix (hidden ones, such as a Mac's ``._photo.jpg``, under "hidden");
    num_outside counts links that were not followed.
    """

    root: Path
    images: list[str] = field(default_factory=list)
    parquet: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    num_outside: int = 0

    def add(self, relative: str) -> None:
        """Sort one file into its kind by extension."""
        suffix = os.path.splitext(relative)[1].lower()
        if is_hidden(relative):
            self.ignored["hidden"] += 1
        elif suffix in EXTENSIONS:
            self.images.append(relative)
        elif suffix == ".parquet":
            self.parquet.append(relative)
        elif suffix == ".tar":
            self.tars.append(relative)
        else:
            self.ignored[suffix or "no suffix"] += 1

    def require_any(self, name: str) -> None:
        """Raise ImageSourceError, saying what was seen and what would be read, when nothing is usable."""
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in self.ignored.most_common(5))
        if self.images or self.parquet or self.tars:
            if kinds:
                logger.info("images.source=%r: %d other files ignored (%s)", name, self.ignored.total(), kinds)
            return
        outside = (
            f" ({self.num_outside} links were not followed: they are folders or leave this one)"
            if self.num_outside
            else ""
        )
        found = f"none of the {self.ignored.total()} files is an image ({kinds})" if kinds else "it holds no files"
        raise ImageSourceError(
            f"images.source={name!r}: {found}{outside}; read are {' '.join(sorted(EXTENSIONS))}, .parquet and .tar"
        )


def is_hidden(relative: str) -> bool:
    """Whether the last part of a path starts with a dot."""
    return relative.rsplit("/", 1)[-1].startswith(".")


def list_folder(root: Path) -> Listing:
    """Walk a folder tree. Links to files are read when they stay inside the root; links to folders never are."""
    root = root.resolve()
    listing, boundary = Listing(root), link_boundary(root)
    for folder, subfolders, names in os.walk(root):
        listing.num_outside += sum(os.path.islink(os.path.join(folder, name)) for name in subfolders)
        subfolders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(boundary):
                listing.num_outside += 1
            else:
                listing.add(path.relative_to(root).as_posix())
    for kind in (listing.images, listing.parquet, listing.tars):
        kind.sort()
    return listing


def list_glob(pattern: str) -> Listing:
    """Files matching a glob (``**`` crosses folders); folders among the matches are not entered.

    Relative paths start at the last folder of the pattern without a wildcard.
    """
    fixed = pattern.split("*")[0].split("?")[0].split("[")[0]
    root = Path(os.path.dirname(fixed) or ".").resolve()
    listing = Listing(root)
    for match in sorted(glob.glob(pattern, recursive=True)):
        if os.path.isfile(match):
            listing.add(Path(os.path.abspath(match)).relative_to(os.path.abspath(root)).as_posix())
    return listing


def list_file(path: Path) -> Listing:
    """One file; its folder is the root."""
    listing = Listing(path.parent.resolve())
    listing.add(path.name)
    return listing


def file_units(root: Path, relatives: Sequence[str], source: str) -> list[Unit]:
    """Units of files: one file each, or, for large trees, up to 64 files taken at even distances over the tree,
    so that consecutive images come from different folders."""
    per_unit = min(MAX_FILES_PER_UNIT, math.ceil(len(relatives) / UNITS_BEFORE_GROUPING))
    num_units = math.ceil(len(relatives) / per_unit) if per_unit else 0
    return [_file_unit(root, relatives[start::num_units], source) for start in range(num_units)]


def _file_unit(root: Path, relatives: Sequence[str], source: str) -> Unit:
    key = relatives[0] if len(relatives) == 1 else f"{relatives[0]}+{len(relatives) - 1}:{short_hash(relatives)}"
    return Unit(key, source, partial(_file_rows, root, relatives))


def _file_rows(root: Path, relatives: Sequence[str]) -> list[Row]:
    return [Row(relative, partial(Path, root, relative)) for relative in relatives]
