"""The model's own grid rule, applied once in the loader, so that rollout engine and trainer see identical pixels."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

from PIL import Image

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ConfigError
from trinity_vlm.images.decode import BadImage, Decoded, DecodeLimits, ImageData, decode

MAX_GRID_ASPECT = 200


@dataclass(frozen=True, slots=True)
class GridSize:
    """The grid of a backbone: ``unit`` = patch size x merge size in pixels (28 for Qwen2.5-VL, 32 for Qwen3-VL),
    and the smallest and largest area in pixels."""

    unit: int
    min_pixels: int
    max_pixels: int

    def size_for(self, width: int, height: int) -> tuple[int, int]:
        """``smart_resize`` to this grid."""
        return smart_resize(width, height, self.unit, self.min_pixels, self.max_pixels)


def smart_resize(width: int, height: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Qwen's rule: both sides become multiples of ``unit``, the area falls in [min_pixels, max_pixels], the aspect
    ratio is kept as well as the grid allows. Returns (width, height).

    Where that rule would miss its own limits (very long images, or limits close together) the grid in the limits with
    the nearest aspect ratio is taken. So the result always maps to itself, and the model's processor, given the same
    limits, leaves the pixels alone.
    Raises BadImage("extreme_aspect") above 200:1, where the models' processors refuse too, and ConfigError when no
    grid has an area in the limits.
    """
    if max(width, height) > MAX_GRID_ASPECT * min(width, height):
        raise BadImage("extreme_aspect", f"{width}x{height} is longer than {MAX_GRID_ASPECT}:1")
    size = _rounded_grid(width, height, unit, min_pixels, max_pixels)
    if min_pixels <= size[0] * size[1] <= max_pixels and max(size) <= MAX_GRID_ASPECT * min(size):
        return size
    return _nearest_grid(width, height, unit, min_pixels, max_pixels)


def _rounded_grid(width: int, height: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    grid_width, grid_height = round(width / unit) * unit, round(height / unit) * unit
    if grid_width * grid_height > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        grid_width = max(unit, math.floor(width / shrink / unit) * unit)
        grid_height = max(unit, math.floor(height / shrink / unit) * unit)
    elif grid_width * grid_height < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        grid_width = math.ceil(width * grow / unit) * unit
        grid_height = math.ceil(height * grow / unit) * unit
    return grid_width, grid_height


def _nearest_grid(width: int, height: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The grid in the limits with the nearest log aspect ratio; of equals the squarest, then the largest."""
    fewest, most = math.ceil(min_pixels / unit**2), max_pixels // unit**2
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(math.ceil(fewest / columns), most // columns + 1)
        if max(columns, rows) <= MAX_GRID_ASPECT * min(columns, rows)
    ]
    if not grids:
        raise ConfigError(
            f"model.min_pixels={min_pixels} and model.max_pixels={max_pixels} allow no image whose sides are multiples "
            f"of {unit}; let a multiple of {unit**2} lie between them"
        )

    def badness(grid: tuple[int, int]) -> tuple[float, float, int]:
        shape = math.log(grid[0] / grid[1])
        return round(abs(shape - math.log(width / height)), 9), abs(shape), -grid[0] * grid[1]

    columns, rows = min(grids, key=badness)
    return columns * unit, rows * unit


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize to (width, height) by bicubic interpolation; the same object when nothing changes."""
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def load_image(data: ImageData, config: ImagesConfig, grid: GridSize | None) -> Image.Image:
    """The pixels that ``load_sized`` gives."""
    return load_sized(data, config, grid).pixels


def load_sized(data: ImageData, config: ImagesConfig, grid: GridSize | None) -> Decoded:
    """Decode and, given a grid, resize: what the model sees of an image, whichever way the image came, and the size
    that the image had before.

    JPEGs far above the grid are decoded at a reduced scale, which rounds their sides; they are resized to what the
    grid makes of the whole size all the same. Raises BadImage.
    """
    if grid is None:
        return decode(data, DecodeLimits.from_config(config))
    found = decode(data, DecodeLimits.from_config(config, grid.max_pixels))
    return Decoded(resize_image(found.pixels, grid.size_for(*found.size)), found.size)


def thumbnail(image: Image.Image, side: int) -> bytes:
    """A JPEG of the image whose longer side is at most ``side`` pixels, for episode files and reports."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
