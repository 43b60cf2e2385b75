"""From a path or hub id to a model, its processor and the token ids that matter."""

from __future__ import annotations

import inspect
import json
import logging
import math
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

from trinity_vlm.backbone.adapters import target_layers
from trinity_vlm.backbone.shared_attention import NAME as SHARED_ROWS
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.errors import ConfigError, ModelLoadError

EMBEDDED = "tiny"
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_log = logging.getLogger(__name__)


def resolve_path(path: str) -> str:
    """The directory or hub id to load; ``tiny`` is the checkpoint inside the package.

    Raises ModelLoadError for a directory that is missing or lacks files, saying what was looked for.
    """
    if path == EMBEDDED:
        path = str(resources.files("trinity_vlm.tiny") / "checkpoint")
    directory = Path(path).expanduser()
    if directory.is_dir():
        missing = [name for name in ("config.json", "tokenizer_config.json") if not (directory / name).is_file()]
        if not any(any(directory.glob(pattern)) for pattern in _WEIGHT_FILES):
            missing.append(" or ".join(_WEIGHT_FILES))
        if missing:
            raise ModelLoadError(
                f"model.path={path!r}: the directory lacks {', '.join(missing)}; "
                "expected a model saved by save_pretrained together with its processor"
            )
        return str(directory)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"model.path={path!r}: no such directory. Give a directory with config.json, weights and processor files, "
            f"a hub id such as 'Qwen/Qwen3-VL-8B-Instruct', or {EMBEDDED!r} for the embedded model"
        )
    return path


def choose_device(config: ModelConfig) -> torch.device:
    """The device of ``model.device``; raises ModelLoadError when a GPU is asked for and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("model.device=cuda, but torch sees no GPU; set model.device=cpu or auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_model(config: ModelConfig) -> nn.Module:
    """Any AutoModelForImageTextToText in eval mode on its device; raises ModelLoadError naming path and cause."""
    device = choose_device(config)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.dtype)
    try:
        model: Any = AutoModelForImageTextToText.from_pretrained(
            resolve_path(config.path),
            revision=config.revision or "main",
            dtype=dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32),
            attn_implementation=config.attention,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelLoadError(f"model.path={config.path!r}: {error}") from error
    return model.to(device).eval()


def load_processor(config: ModelConfig) -> Any:
    """The processor with ``min_pixels`` and ``max_pixels`` set and probed; works without torchvision.

    AutoProcessor needs torchvision for the families that also take videos. Without it the same processor class is
    loaded without its video part, which this package never uses.
    """
    path, revision = resolve_path(config.path), config.revision or "main"
    cause: Exception | None = None
    processor: Any = None
    try:
        processor = AutoProcessor.from_pretrained(path, revision=revision)
    except (ImportError, ValueError, OSError) as error:
        cause = error
    if not hasattr(processor, "image_processor"):
        try:
            processor = _image_only(_processor_class(path, revision)).from_pretrained(path, revision=revision)
        except (ImportError, ValueError, OSError, AttributeError, TypeError) as error:
            raise ModelLoadError(
                f"model.path={config.path!r}: no processor for images and text found there: {error}"
                + (f"; AutoProcessor said: {cause}" if cause else "")
            ) from error
    if not processor.chat_template and not processor.tokenizer.chat_template:
        raise ModelLoadError(
            f"model.path={config.path!r}: the processor has no chat template; use an instruct checkpoint"
        )
    _limit_pixels(processor.image_processor, config)
    return processor


def _processor_class(path: str, revision: str) -> type[ProcessorMixin]:
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        file = (
            Path(path) / name
            if Path(path).is_dir()
            else Path(transformers.utils.cached_file(path, name, revision=revision) or "")
        )
        if file.is_file() and (found := json.loads(file.read_text()).get("processor_class")):
            return getattr(transformers, found)
    raise ValueError("no file names a processor_class")


def _image_only(base: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """``base`` without its video processor; which parts are loaded is read from the signature of ``__init__``."""
    if "video_processor" not in inspect.signature(base.__init__).parameters:
        return base

    class ImageOnly(base):  # type: ignore[valid-type, misc]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
        ) -> None:
            kwargs.pop("video_processor", None)
            super().__init__(
                image_processor=image_processor,
                tokenizer=tokenizer,
                video_processor=None,
                chat_template=chat_template,
                **kwargs,
            )

    ImageOnly.__name__ = base.__name__
    ImageOnly.__module__ = import_module(base.__module__).__name__
    return ImageOnly


def counts_pixels(image_processor: Any) -> bool:
    """Whether images are resized to a patch grid between two pixel counts (Qwen-VL families)."""
    size = getattr(image_processor, "size", None)
    return hasattr(image_processor, "merge_size") and size is not None and "shortest_edge" in size


def _limit_pixels(image_processor: Any, config: ModelConfig) -> None:
    """Set the pixel limits (counts, despite the names of the keys) and prove on two images that they act."""
    if not counts_pixels(image_processor):
        _log.info("model.min_pixels/max_pixels don't apply: %s fixes its own size", type(image_processor).__name__)
        return
    unit = image_processor.patch_size * image_processor.merge_size
    if config.max_pixels < unit * unit:
        raise ConfigError(f"model.max_pixels={config.max_pixels}: below one image token of {unit}x{unit} pixels")
    image_processor.size = type(image_processor.size)(shortest_edge=config.min_pixels, longest_edge=config.max_pixels)
    side = math.isqrt(config.max_pixels) + unit
    for probe in (unit, 2 * side):
        grid = image_processor(images=[Image.new("RGB", (probe, probe))], return_tensors="pt")["image_grid_thw"]
        pixels = int(grid.prod()) * image_processor.patch_size**2
        floor = min(config.min_pixels, (math.isqrt(config.max_pixels) // unit * unit) ** 2)
        if not floor <= pixels <= max(config.max_pixels, (math.ceil(math.sqrt(config.min_pixels) / unit) * unit) ** 2):
            raise ModelLoadError(
                f"a {probe}x{probe} image became {pixels} pixels, outside model.min_pixels={config.min_pixels} .. "
                f"max_pixels={config.max_pixels}: this version of transformers ignores the limits"
            )


def attends_by_mask(model: nn.Module) -> bool:
    """Whether every layer is full attention that obeys a boolean mask given per query: sdpa, as it is or wrapped.

    Eager attention does not: it adds the mask to its scores.
    """
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    layers = getattr(text, "layer_types", None) or ["full_attention"]
    return text._attn_implementation in ("sdpa", SHARED_ROWS) and set(layers) == {"full_attention"}


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an assistant turn: those of the generation config and the tokenizer's own."""
    declared = model.generation_config.eos_token_id
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    return frozenset(ids | {tokenizer.eos_token_id}) - {None}


def never_sampled_ids(model: Any, tokenizer: Any, ends: frozenset[int]) -> frozenset[int]:
    """Ids that would break the next forward pass or mean nothing: structure tokens and rows without a token.

    Every special token (image, video and vision marks, turn openers, padding) except ends of turn and thinking marks,
    and the rows of the output layer beyond the tokenizer's vocabulary.
    """
    special = {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special and "think" not in token.content
    }
    rows = model.get_output_embeddings().weight.shape[0]
    return frozenset((special | set(tokenizer.all_special_ids) | set(range(len(tokenizer), rows))) - ends)


def check_model(config: ModelConfig, lora: LoraConfig) -> None:
    """Refuse what can be refused without weights: device, files, processor, LoRA targets.

    Of a hub id only the form is checked: nothing is fetched. Raises ModelLoadError or ConfigError.
    """
    choose_device(config)
    path = resolve_path(config.path)
    if not Path(path).is_dir():
        return
    load_processor(config)
    try:
        shape = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            skeleton = AutoModelForImageTextToText.from_config(shape)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelLoadError(f"model.path={config.path!r}: {error}") from error
    target_layers(skeleton, lora.targets)
