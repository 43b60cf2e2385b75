"""Parquet shards of a Hugging Face data set, read over HTTP ranges: footers, then image column chunks only."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.parquet import parquet_units
from trinity_vlm.images.source import ImageSource
from trinity_vlm.images.storage import RemoteStorage

HUB_PREFIX = "hf://datasets/"
TRAIN = re.compile(r"(^|[/_.-])train")


def open_hub(name: str, column: str) -> ImageSource:
    """Open ``owner/name``, ``hf://datasets/owner/name[@revision]`` or ``hf://datasets/owner/name/<glob>.parquet``.

    Without a glob the shards of the train split are read, or all shards when no file or folder name says "train".
    Raises ImageSourceError without the ``hub`` extra, without access, or when no parquet shard matches.
    """
    filesystem = _filesystem(name)
    path = name.removeprefix(HUB_PREFIX).strip("/")
    repository = "datasets/" + "/".join(path.split("/")[:2])
    pattern = path.split("/", 2)[2] if path.count("/") >= 2 else ""
    try:
        found = sorted(filesystem.glob(f"{repository}/{pattern or '**/*.parquet'}"))
    except Exception as error:  # network, authentication and missing repositories come as unrelated types
        raise ImageSourceError(
            f"images.source={name!r}: no such local path, and the hub can't be read: {error}. Check the spelling, the "
            "network, and for gated data sets `hf auth login`"
        ) from error
    shards = [posixpath.relpath(shard, repository) for shard in found if shard.endswith(".parquet")]
    if not pattern:
        shards = [shard for shard in shards if TRAIN.search(shard)] or shards
    if not shards:
        raise ImageSourceError(
            f"images.source={name!r}: no parquet shard there; the hub's own conversion, if any, is at "
            f"{HUB_PREFIX}{'/'.join(path.split('/')[:2])}@refs%2Fconvert%2Fparquet"
        )
    return ImageSource(name, tuple(parquet_units(RemoteStorage(filesystem, repository), shards, column, name)))


def _filesystem(name: str) -> Any:
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        raise ImageSourceError(
            f"images.source={name!r} is read from the hub, which needs the extra: pip install 'trinity-vlm[hub]'"
        ) from error
    return HfFileSystem()
