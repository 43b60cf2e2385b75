"""A model's sizes from its config alone: a skeleton without weights is counted, nothing else is loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForImageTextToText

from trinity_vlm.backbone.adapters import language_linears, target_layers
from trinity_vlm.backbone.loading import resolve_path
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.errors import ModelLoadError
from trinity_vlm.model_shapes import ModelShape, known_shape

_FIXED_IMAGE_TOKENS = ("mm_tokens_per_image", "image_seq_length")


@cache
def read_shape(model: ModelConfig, lora: LoraConfig, *, fetch: bool) -> tuple[ModelShape, bool]:
    """The shape of ``model.path`` and whether it is a built-in one, taken where no config can be read.

    Read once per process: three places of a start ask for it.

    fetch: ask the hub for a config that is neither here nor built in
    Raises ModelLoadError, saying what to do, when there is none; ConfigError for LoRA targets that match nothing.
    """
    try:
        config = _config(model, local=True)
    except ModelLoadError:
        known = known_shape(model.path, lora.targets)
        if known is not None:
            return known, True
        if not fetch or Path(model.path).is_dir():
            raise
        config = _config(model, local=False)
    return shape_of(config, lora, model.path), False


def shape_of(config: Any, lora: LoraConfig, name: str) -> ModelShape:
    """The shape of a transformers config; raises ModelLoadError where the family lacks a size that is needed."""
    try:
        with torch.device("meta"):
            skeleton: Any = AutoModelForImageTextToText.from_config(config)
        text, vision = config.get_text_config(), getattr(config, "vision_config", None)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        linears = language_linears(skeleton)
        return ModelShape(
            name=name,
            parameters=sum(p.numel() for p in skeleton.parameters()),
            hidden=text.hidden_size,
            mlp=text.intermediate_size,
            layers=text.num_hidden_layers,
            query=text.num_attention_heads * width,
            key=kv_heads * width,
            vocabulary=text.vocab_size,
            matrices=tuple(
                (linears[layer].in_features, linears[layer].out_features)
                for layer in target_layers(skeleton, lora.targets)
            ),
            pixels_per_token=_pixels_per_token(vision),
            fixed_image_tokens=next((n for key in _FIXED_IMAGE_TOKENS if (n := getattr(config, key, 0))), 1024),
            vision_taps=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"model.path={name!r}: no sizes to plan with: {error}") from error


def _config(model: ModelConfig, *, local: bool) -> Any:
    place = _place(model.path)
    try:
        return AutoConfig.from_pretrained(place, revision=model.revision or "main", local_files_only=local)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        if Path(place).is_dir():
            way_out = f"Look at {Path(place) / 'config.json'}, or give another model.path"
        else:
            way_out = f"Give a directory that holds config.json, or download it first: hf download {model.path}"
        raise ModelLoadError(f"model.path={model.path!r}: its config can't be read ({reason}). {way_out}") from error


def _place(path: str) -> str:
    """A directory needs no weights to be planned with; anything else is resolved as for loading."""
    directory = Path(path).expanduser()
    return str(directory) if (directory / "config.json").is_file() else resolve_path(path)


def _pixels_per_token(vision: Any) -> int | None:
    """Of families that resize to a grid of merged patches (Qwen-VL)."""
    patch, merge = getattr(vision, "patch_size", None), getattr(vision, "spatial_merge_size", None)
    return (patch * merge) ** 2 if isinstance(patch, int) and isinstance(merge, int) else None
