"""An environment's images as an image source: pixels only, drawn when they are read, no files."""

from __future__ import annotations

from functools import partial

from trinity_vlm.config import ImagesConfig
from trinity_vlm.environments.protocol import Environment
from trinity_vlm.images.decode import ImageData
from trinity_vlm.images.source import ImageSource, Row, Unit

UNITS = 2048
ROWS_PER_UNIT = 64


def environment_source(environment: Environment, split: str, config: ImagesConfig) -> ImageSource:
    """The first UNITS x ROWS_PER_UNIT images of a split. Raises ConfigError for an unknown split.

    Image uids are the environment's own, so that ``environment.scene_of`` finds their scenes afterwards.
    """
    environment.scene(split, 0)
    name = f"{environment.name}:{split}"
    units = [Unit(f"{name}#{k}", name, partial(_rows, environment, split, k)) for k in range(UNITS)]
    return ImageSource(name, tuple(units))


def _rows(environment: Environment, split: str, unit: int) -> list[Row]:
    indices = range(unit * ROWS_PER_UNIT, (unit + 1) * ROWS_PER_UNIT)
    return [Row(environment.uid(split, index), partial(_pixels, environment, split, index)) for index in indices]


def _pixels(environment: Environment, split: str, index: int) -> ImageData:
    return environment.image(split, index)[1]
