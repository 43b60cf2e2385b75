"""What an image source is: an ordered list of units, each a list of rows, each one image that is read when asked for.

A source of your own is a function that returns an ``ImageSource``; name it in ``images.source`` as
``package.module:function``::

    def slides(config: ImagesConfig) -> ImageSource:
        def load(day: str) -> list[Row]:
            return [Row(f"{day}/{name}", partial(fetch_png, day, name)) for name in names(day)]

        return ImageSource("slides", tuple(Unit(day, "slides", partial(load, day)) for day in days()))
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import BadImage, ImageData


@dataclass(frozen=True, slots=True)
class Row:
    """One image before it is read. ``uid`` is stable between runs and machines (never an absolute path);
    ``read`` returns encoded bytes, a file or a decoded picture, or raises BadImage."""

    uid: str
    read: Callable[[], ImageData]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is opened, shuffled and assigned to a worker at once: a row group, a tar, some files.

    key: identifies the unit and its contents' extent, for example ``"train-00.parquet#3:100"``; part of the manifest
    source: the configured string it came from; units of one source are spread evenly over an epoch
    load: opens the unit; called once per visit; raises BadImage when the whole unit can't be read
    """

    key: str
    source: str
    load: Callable[[], Sequence[Row]]


def load_rows(unit: Unit) -> list[Row]:
    """The rows of a unit; a unit that can't be opened is one row that can't be read, so that it is counted."""
    try:
        return list(unit.load())
    except BadImage as bad:
        return [Row(unit.key, partial(raise_bad, bad))]


def raise_bad(bad: BadImage) -> ImageData:
    """The ``read`` of a row that is known to be bad."""
    raise bad


@dataclass(frozen=True)
class ImageSource:
    """An ordered, non-empty list of units. Raises ImageSourceError when there is none."""

    name: str
    units: tuple[Unit, ...]

    def __post_init__(self) -> None:
        if not self.units:
            raise ImageSourceError(f"images.source={self.name!r} holds no images")

    @cached_property
    def manifest_hash(self) -> str:
        """16 hex digits over all unit keys: a resumed run must see the same one."""
        return short_hash([unit.key for unit in self.units])


SourceFactory = Callable[[str, ImagesConfig], ImageSource]

_FACTORIES: dict[str, SourceFactory] = {}


def register_source(scheme: str, factory: SourceFactory) -> None:
    """Let ``images.source`` strings ``scheme:ARGUMENT`` be opened by ``factory(ARGUMENT, config)``."""
    _FACTORIES[scheme] = factory


def registered_sources() -> dict[str, SourceFactory]:
    """The registered schemes and their factories."""
    return dict(_FACTORIES)


def short_hash(parts: Sequence[str]) -> str:
    """16 hex digits identifying an ordered list of strings."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def concatenate(sources: Sequence[ImageSource], labels: Sequence[str]) -> ImageSource:
    """One source of several; each one's uids and keys are prefixed by its label so that they stay distinct."""
    if len(sources) == 1:
        return sources[0]
    units = [_labelled(unit, label) for source, label in zip(sources, labels, strict=True) for unit in source.units]
    return ImageSource(", ".join(source.name for source in sources), tuple(units))


def _labelled(unit: Unit, label: str) -> Unit:
    return replace(unit, key=f"{label}/{unit.key}", load=partial(_labelled_rows, unit, label))


def _labelled_rows(unit: Unit, label: str) -> list[Row]:
    return [replace(row, uid=f"{label}/{row.uid}") for row in unit.load()]


def epoch_order(units: Sequence[Unit], rng: random.Random) -> list[int]:
    """A random order of unit indices in which the units of each configured source are spread evenly.

    Unit j (after shuffling) of a source with n units stands at a random place of the j-th n-th of the epoch, so that
    every stretch of the epoch holds the sources in proportion to their numbers of units.
    """
    groups: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        groups.setdefault(unit.source, []).append(index)
    placed: list[tuple[float, int]] = []
    for members in groups.values():
        rng.shuffle(members)
        placed += [((j + rng.random()) / len(members), index) for j, index in enumerate(members)]
    return [index for _, index in sorted(placed)]
