"""Opening sources in tests, and what they then hold."""

import pytest
from image_factory import (
    index_of,
)

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images import (
    DecodeLimits,
    ImageSource,
    Row,
    decode_image,
    open_source,
)

LIMITS = DecodeLimits(1, 10**8, 1000.0)


def open_path(*names, **settings) -> ImageSource:
    return open_source(ImagesConfig(source=tuple(map(str, names)), **settings))


def rows_of(opened: ImageSource) -> dict[str, Row]:
    rows = [row for unit in opened.units for row in unit.load()]
    assert len({row.uid for row in rows}) == len(rows)
    return {row.uid: row for row in rows}


def indices(opened: ImageSource) -> list[int]:
    return sorted(index_of(decode_image(row.read(), LIMITS)) for row in rows_of(opened).values())


def failure(*names, **settings) -> str:
    with pytest.raises(ImageSourceError) as caught:
        open_path(*names, **settings)
    return str(caught.value)
