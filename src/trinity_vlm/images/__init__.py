"""Unlabeled images in: sources, one decoder, one resize, and a resumable stream.

source = open_source(config.images)
stream = ImageStream(source, config.images, config.seed, worker, world, GridSize(32, min_pixels, max_pixels))
records = stream.take(16)
"""

from trinity_vlm.images.audit import ImageAudit, audit
from trinity_vlm.images.decode import BadImage, DecodeLimits, ImageData, decode_image
from trinity_vlm.images.opening import open_source
from trinity_vlm.images.resize import GridSize, load_image, resize_image, smart_resize, thumbnail
from trinity_vlm.images.source import ImageSource, Row, Unit, register_source, registered_sources
from trinity_vlm.images.stream import ImageStream, StreamState

__all__ = [
    "BadImage",
    "DecodeLimits",
    "GridSize",
    "ImageAudit",
    "ImageData",
    "ImageSource",
    "ImageStream",
    "Row",
    "StreamState",
    "Unit",
    "audit",
    "decode_image",
    "load_image",
    "open_source",
    "register_source",
    "registered_sources",
    "resize_image",
    "smart_resize",
    "thumbnail",
]
