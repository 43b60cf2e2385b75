"""Small real parts for the loop's tests: the embedded model, images, rollouts with known advantages."""

from pathlib import Path

import numpy as np
from PIL import Image

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import LoraConfig, UpdateConfig, load_config
from trinity_vlm.types import Completion, ImageRecord, Message, Prompt, Role, Rollout

SMALL = ("steps=2", "images.per_step=2", "roles.candidates=2", "roles.solutions=2", "evaluation.problems=8")
"""The smallest run in which candidates of the embedded model are selected and rollouts of both roles are kept."""

UPDATE = UpdateConfig(lr=1e-3, gradient_checkpointing="off", warmup_steps=0)


def tiny_backbone(seed=0, rank=4):
    """The embedded model on the CPU with a small policy adapter."""
    return Backbone.load(load_config("tiny").model, LoraConfig(rank=rank, alpha=2 * rank), seed)


def small_config(*overrides):
    """The tiny preset at its smallest; later overrides win."""
    return load_config("tiny", [*SMALL, *overrides])


def picture(index):
    """A distinct 128 x 128 image."""
    pixels = np.random.default_rng(index).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    return ImageRecord(f"picture-{index}", Image.fromarray(pixels))


def rollout(backbone, index, advantage, length=6, role=Role.SOLVER):
    """A rollout with made-up tokens that the tokenizer knows."""
    prompt = Prompt(
        (Message("system", "solve"), Message("user", f"How many {index}?", picture(index % 3))), "<think>\n"
    )
    rng = np.random.default_rng(index)
    tokens = (*rng.integers(50, 400, length).tolist(), min(backbone.eos_ids))
    completion = Completion(backbone.encode(prompt).input_ids, tokens, "", "stop")
    return Rollout(role, f"picture-{index % 3}", index, prompt, completion, advantage, advantage)


def some_rollouts(backbone, count=9):
    """Mixed roles, lengths and signs."""
    return [
        rollout(backbone, i, (-1.0) ** i * (0.5 + i / 4), length=3 + 2 * i, role=list(Role)[i % 2])
        for i in range(count)
    ]


def weights(backbone):
    """Copies of all trainable tensors by name."""
    return {name: p.detach().clone() for name, p in backbone.trainable_parameters()}


def largest_difference(left, right):
    """Maximum absolute difference over two sets of weights."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def relative_difference(start, left, right):
    """Euclidean distance between two results of an update, over the length of the way from ``start`` to the first.

    Not the largest difference: Adam's first step divides each gradient by its own size, rounding noise included.
    """
    apart = sum(float((left[name] - right[name]).square().sum()) for name in start)
    moved = sum(float((left[name] - start[name]).square().sum()) for name in start)
    return (apart / moved) ** 0.5


def write_images(folder: Path, count=4):
    """PNG files in a folder, as a user's own pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        picture(index).pixels.save(folder / f"{index}.png")
    return folder
