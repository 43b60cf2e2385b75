"""From the strings of ``images.source`` to one ImageSource."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.files import Listing, file_units, list_file, list_folder, list_glob
from trinity_vlm.images.hub import HUB_PREFIX, open_hub
from trinity_vlm.images.parquet import parquet_units
from trinity_vlm.images.source import ImageSource, concatenate, registered_sources
from trinity_vlm.images.storage import LocalStorage
from trinity_vlm.images.webdataset import tar_units

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def open_source(config: ImagesConfig) -> ImageSource:
    """Open every string of ``config.source`` and put them together, interleaved by epoch_order.

    A string is, in this order: an existing file or folder; a registered ``scheme:ARGUMENT``; a hub data set
    (``hf://datasets/...`` or ``owner/name``); a glob; or the import path of your own
    ``factory(config) -> ImageSource``.
    Raises ImageSourceError when one is missing, empty or unreadable.
    """
    names = (config.source,) if isinstance(config.source, str) else config.source
    if not names:
        raise ImageSourceError("images.source is an empty list; name at least one folder, file, glob or hub id")
    return concatenate([_open_one(name, config) for name in names], _labels(names))


def _open_one(name: str, config: ImagesConfig) -> ImageSource:
    path = Path(os.path.expanduser(name))
    scheme, _, argument = name.partition(":")
    if path.is_dir():
        return _open_listing(list_folder(path), name, config)
    if path.is_file():
        return _open_listing(list_file(path), name, config)
    if scheme in registered_sources():
        return registered_sources()[scheme](argument, config)
    if name.startswith(HUB_PREFIX) or (HUB_ID.fullmatch(name) and not Path(name).parent.exists()):
        return open_hub(name, config.column)
    if any(character in name for character in "*?["):
        return _open_listing(list_glob(str(path)), name, config)
    if IMPORT_PATH.fullmatch(name):
        return _open_imported(name, config)
    raise ImageSourceError(f"images.source={name!r}: no such file or folder (working directory {Path.cwd()})")


def _open_listing(listing: Listing, name: str, config: ImagesConfig) -> ImageSource:
    """Images if there are any (a ``metadata.parquet`` beside them is not a shard), else all shards."""
    listing.require_any(name)
    if listing.images:
        return ImageSource(name, tuple(file_units(listing.root, listing.images, name)))
    storage = LocalStorage(listing.root)
    shards = parquet_units(storage, listing.parquet, config.column, name)
    return ImageSource(name, (*shards, *tar_units(storage, listing.tars, name)))


def _open_imported(name: str, config: ImagesConfig) -> ImageSource:
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        known = ", ".join(sorted(registered_sources())) or "none"
        raise ImageSourceError(
            f"images.source={name!r} is no path, no registered scheme ({known}) and can't be imported: {error}"
        ) from error
    source = factory(config)
    if not isinstance(source, ImageSource):
        raise ImageSourceError(
            f"images.source={name!r} returned {type(source).__name__}; it must return an ImageSource"
        )
    return source


def _labels(names: tuple[str, ...]) -> list[str]:
    """A short uid prefix per string: its last part without wildcards, numbered when it occurs twice."""
    labels: list[str] = []
    for name in names:
        parts = [part for part in re.split(r"[/\\]", name) if part and not re.search(r"[*?\[]", part)]
        label = parts[-1] if parts else "images"
        taken = sum(other == label or other.startswith(f"{label}~") for other in labels)
        labels.append(f"{label}~{taken + 1}" if taken else label)
    return labels
