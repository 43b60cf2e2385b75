"""One picture from a file, decoded and resized by the same rules as a stream's."""

from __future__ import annotations

from pathlib import Path

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import BadImage
from trinity_vlm.images.resize import GridSize, load_image
from trinity_vlm.types import ImageRecord


def read_image(path: Path, config: ImagesConfig, grid: GridSize | None) -> ImageRecord:
    """Load ``path`` as a stream with this grid would; raises ImageSourceError naming the file and why it can't."""
    try:
        pixels = load_image(path, config, grid)
    except BadImage as bad:
        raise ImageSourceError(f"{path}: {bad}; give a readable picture (PNG, JPEG, WebP, TIFF ...)") from None
    return ImageRecord(path.name, pixels, str(path))
