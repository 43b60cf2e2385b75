"""A really small model of the embedded architecture, and examples for it."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import ModelConfig, load_config
from trinity_vlm.supervised import SupervisedExample
from trinity_vlm.tiny.architecture import TinySize, build_model, processor_config
from trinity_vlm.tiny.tokenizer import train_tokenizer
from trinity_vlm.types import ImageRecord, Message, Prompt

SMALL = TinySize(64, 1, 64, 128, 2, 256, heads=2, kv_heads=1, deepstack=(0,))


def write_small_model(directory: Path) -> ModelConfig:
    """Random weights with a tokenizer of 700 entries: loads in a fraction of a second."""
    tokenizer = train_tokenizer(["How many red stars are there? a1 big red star = 1"] * 50, size=700)
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(processor_config()))
    build_model(tokenizer, 0, SMALL).save_pretrained(directory)
    return load_config("tiny").model.model_copy(update={"path": str(directory), "device": "cpu"})


def load_small(model: ModelConfig) -> Backbone:
    return Backbone.load(model, None)


def picture(shade: int, size: tuple[int, int] = (128, 128)) -> ImageRecord:
    image = Image.new("RGB", size, (shade, 30, 255 - shade))
    image.paste((0, shade, 0), (shade // 4, 20, shade // 4 + 40, 90))
    return ImageRecord(f"picture-{shade}", image)


def eight_examples() -> list[SupervisedExample]:
    """Two pictures with three questions each and two text-only ones; the answer is the question's word."""
    examples = []
    for shade, words in ((20, ("red", "big", "are")), (200, ("stars", "many", "there"))):
        image = picture(shade)
        for word in words:
            user = Message("user", f"{word} {word} {word}", image)
            prompt = Prompt((Message("system", "solve"), user), "<think>\n")
            examples.append(SupervisedExample(prompt, f"a1 big star</think>{word}"))
    for word in ("How", "1"):
        prompt = Prompt((Message("system", "match"), Message("user", f"{word} {word} {word}")))
        examples.append(SupervisedExample(prompt, f"= {word}"))
    return examples


class Repeated:
    """The same batch again and again."""

    def __init__(self, examples: list[SupervisedExample], times: int) -> None:
        self.examples = examples
        self.times = times

    def __len__(self) -> int:
        return self.times

    def batch(self, index: int) -> list[SupervisedExample]:
        return self.examples if index % 2 == 0 else self.examples[::-1]
