"""One picture from a file, decoded by the same rules as a stream's."""

from __future__ import annotations

from pathlib import Path

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import BadImage, DecodeLimits, decode_image
from trinity_vlm.types import ImageRecord


def read_image(path: Path, config: ImagesConfig) -> ImageRecord:
    """Decode ``path``; raises ImageSourceError naming the file and why it can't be used."""
    try:
        pixels = decode_image(path, DecodeLimits.from_config(config))
    except BadImage as bad:
        raise ImageSourceError(f"{path}: {bad}; give a readable picture (PNG, JPEG, WebP, TIFF ...)") from None
    return ImageRecord(path.name, pixels, str(path))
