"""One decoder with stated rules: every readable picture becomes upright RGB on white, every other one a named reason.

The order matters: header, limits, JPEG draft, pixels of the first frame, EXIF orientation, then colour. Pillow's global
settings are neither read for policy nor changed; its own decompression-bomb limit (twice ``Image.MAX_IMAGE_PIXELS``,
179 million pixels unless an application changed it) stays active beside ours, and the smaller one wins.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from PIL import Image

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import TrinityError

ImageData: TypeAlias = bytes | Path | Image.Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF")
PHOTO_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".avif", ".jp2", ".j2k")
GRAPHIC_EXTENSIONS = (".png", ".gif", ".tif", ".tiff", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm")
EXTENSIONS = frozenset(PHOTO_EXTENSIONS + GRAPHIC_EXTENSIONS)

ORIENTATION_TAG = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)
DISPLAY_PERCENTILES = (0.5, 99.5)
MAX_PERCENTILE_SAMPLES = 4_000_000


class BadImage(TrinityError):
    """One image that can't be used. ``reason`` is a stable slug, counted by the stream and shown to the user.

    zero_bytes, null_bytes, missing_file, unreadable_file, outside_root, undecodable, truncated, too_large, too_small,
    extreme_aspect; unreadable_unit and damaged_archive stand for a whole row group or the rest of a tar.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What is accepted: sides in pixels, area in pixels, longer side / shorter side.

    ``draft_pixels``: a JPEG is decoded at a reduced scale (1/2, 1/4, 1/8) as long as at least this area remains;
    None decodes at full size.
    """

    min_side: int
    max_pixels: int
    max_aspect_ratio: float
    draft_pixels: int | None = None

    @classmethod
    def from_config(cls, config: ImagesConfig, draft_pixels: int | None = None) -> DecodeLimits:
        return cls(config.min_side, config.max_decode_pixels, config.max_aspect_ratio, draft_pixels)


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """A picture, upright, and its whole (width, height), also where a JPEG was decoded at a reduced scale."""

    pixels: Image.Image
    size: tuple[int, int]


def decode_image(data: ImageData, limits: DecodeLimits) -> Image.Image:
    """The pixels that ``decode`` gives."""
    return decode(data, limits).pixels


def decode(data: ImageData, limits: DecodeLimits) -> Decoded:
    """Decode encoded bytes, a file, or take an already decoded picture; the result is RGB and carries no metadata.

    Raises BadImage, and nothing else, whatever the bytes are.
    """
    try:
        if isinstance(data, Image.Image):
            return _prepare(data, limits)
        with _open_stream(data) as stream, Image.open(stream, formats=_formats()) as image:
            return _prepare(image, limits)
    except BadImage:
        raise
    except (Image.DecompressionBombError, MemoryError) as error:
        raise BadImage("too_large", str(error)) from error
    except Exception as error:  # Pillow's plugins raise any type at all on hostile bytes
        raise BadImage("truncated" if _tells_truncation(error) else "undecodable", str(error)) from error


def _open_stream(data: bytes | Path) -> BinaryIO:
    if isinstance(data, Path):
        try:
            stream: BinaryIO = data.open("rb")
        except FileNotFoundError as error:
            raise BadImage("missing_file", str(data)) from error
        except OSError as error:
            raise BadImage("unreadable_file", str(error)) from error
    else:
        stream = io.BytesIO(data)
    if not stream.read(1):
        stream.close()
        raise BadImage("zero_bytes")
    stream.seek(0)
    return stream


@cache
def _formats() -> tuple[str, ...]:
    """The formats this build of Pillow knows; never EPS and its like, which run a program to decode."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _tells_truncation(error: Exception) -> bool:
    text = str(error).lower()
    return "truncated" in text or "not enough" in text or "premature" in text


def _prepare(image: Image.Image, limits: DecodeLimits) -> Decoded:
    _check_size(image.size, limits)
    whole, drafted = image.size, False
    if limits.draft_pixels is not None:
        _draft(image, limits.draft_pixels)
        drafted = image.size != whole
    image.load()
    method = _turn(image)
    rgb = _to_rgb(image if method is None else image.transpose(method))
    rgb.info = {}
    if not drafted:
        return Decoded(rgb, rgb.size)
    return Decoded(rgb, whole[::-1] if method in SIDEWAYS else whole)


def _check_size(size: tuple[int, int], limits: DecodeLimits) -> None:
    width, height = size
    shorter, longer = min(size), max(size)
    if width * height > limits.max_pixels:
        raise BadImage("too_large", f"{width}x{height} is above {limits.max_pixels} pixels")
    if shorter < limits.min_side:
        raise BadImage("too_small", f"{width}x{height} has a side below {limits.min_side}")
    if longer > limits.max_aspect_ratio * shorter:
        raise BadImage("extreme_aspect", f"{width}x{height} is longer than {limits.max_aspect_ratio:g}:1")


def _draft(image: Image.Image, pixels: int) -> None:
    """Let the JPEG decoder skip detail; a no-op for other formats and for smaller images."""
    width, height = image.size
    scale = math.sqrt(pixels / (width * height))
    if scale < 1:
        image.draft(None, (math.ceil(width * scale), math.ceil(height * scale)))


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What the EXIF orientation asks for. Asked after loading: Pillow turns TIFF files itself and drops their tag."""
    try:
        return UPRIGHT.get(image.getexif().get(ORIENTATION_TAG, 1))
    except Exception:  # damaged metadata must not cost the picture
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _stretch_grey(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        paper = Image.new("RGBA", rgba.size, "white")
        paper.alpha_composite(rgba)
        return paper.convert("RGB")
    return image.convert("RGB")


def _stretch_grey(image: Image.Image) -> Image.Image:
    """Map deep greys (micrographs) to 0..255 by their 0.5 and 99.5 percentiles; Pillow's own conversion clips them.

    Non-finite values become black, a keyed transparent value white, a picture without contrast mid-grey.
    """
    values = np.asarray(image).astype(np.float32)
    usable = np.isfinite(values)
    key = image.info.get("transparency")
    transparent = values == key if isinstance(key, int) else np.zeros_like(usable)
    low, high = _display_range(values[usable & ~transparent])
    if high > low:
        grey = (np.clip(np.where(usable, values, low), low, high) - low) * (255.0 / (high - low))
    else:
        grey = np.where(usable, 128.0, 0.0)
    grey = np.where(transparent, 255.0, grey)
    return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")


def _display_range(values: np.ndarray) -> tuple[float, float]:
    """The percentiles, or the full range when most of the picture is one value."""
    if values.size == 0:
        return 0.0, 0.0
    sample = values[:: math.ceil(values.size / MAX_PERCENTILE_SAMPLES)]
    low, high = np.percentile(sample, DISPLAY_PERCENTILES)
    if high <= low:
        low, high = values.min(), values.max()
    return float(low), float(high)
