"""The grid of image sizes that a model takes, from its processor and the limits of the configuration."""

from __future__ import annotations

from typing import Any

from trinity_vlm.backbone.loading import counts_pixels
from trinity_vlm.config import ModelConfig
from trinity_vlm.images import GridSize


def pixel_grid(processor: Any, config: ModelConfig) -> GridSize | None:
    """What every image is resized to before ``processor`` sees it; None when it fixes a size of its own."""
    image_processor = processor.image_processor
    if not counts_pixels(image_processor):
        return None
    return GridSize(image_processor.patch_size * image_processor.merge_size, config.min_pixels, config.max_pixels)
