"""Shared by the role tests: completions without a model, an image without a file, the shipped set-up."""

from PIL import Image

from trinity_vlm.config import RolesConfig
from trinity_vlm.roles import PromptSet
from trinity_vlm.types import Completion, ImageRecord

PAPER = PromptSet.load("paper")
CONFIG = RolesConfig()
NO_PREFIX = RolesConfig(thinking_prefix="")
IMAGE = ImageRecord("a.png", Image.new("RGB", (8, 8)))


def completion(text: str, truncated: bool = False) -> Completion:
    return Completion((1, 2), (3, 4), text, "length" if truncated else "stop")


def thought(rest: str) -> Completion:
    """A completion that continues the default thinking prefix, closes it and goes on with ``rest``."""
    return completion(f"I look at the image.\n</think>\n{rest}")
