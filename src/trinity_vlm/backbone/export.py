"""From a trained adapter to directories that other programs load: a PEFT adapter, or a merged model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoProcessor
from transformers.utils import is_torchvision_available

from trinity_vlm.backbone.core import Backbone
from trinity_vlm.backbone.loading import load_model, resolve_path
from trinity_vlm.config import ModelConfig
from trinity_vlm.ema import LowRank

SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
CARD = "README.md"
WEIGHT_INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What merging kept of the learnt delta D after rounding to the output dtype.

    survived: 1 - |rounded(W + D) - W - D| / |D| over all adapted layers (Frobenius norms), 1.0 when nothing is lost
    relative_size: |D| / |W|
    """

    survived: float
    relative_size: float


def save_adapter(backbone: Backbone, name: str, folder: Path) -> None:
    """Write the adapter as a PEFT directory: ``PeftModel.from_pretrained(base, folder)`` loads it.

    Without the model card that peft adds, a template to be filled in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backbone.model.save_pretrained(str(folder), selected_adapters=[name])  # type: ignore[operator]
    nested = folder / name
    for file in nested.iterdir():
        file.replace(folder / file.name)
    nested.rmdir()
    (folder / CARD).unlink(missing_ok=True)


def save_merged(factors: Mapping[str, LowRank], config: ModelConfig, folder: Path) -> MergeReport:
    """Write base plus delta, in the base checkpoint's own dtype, as a directory that transformers and vLLM load.

    The sum is formed in float32 and rounded once. Processor and tokenizer files are copied from the base as they are.
    Raises ModelLoadError when the base can't be loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = load_model(config.model_copy(update={"device": "cpu", "dtype": "auto"}))
    dtype = _checkpoint_dtype(config)
    report = _merge(base, factors, dtype)
    base.to(dtype).save_pretrained(str(folder))  # type: ignore[operator]
    _copy_side_files(config, folder)
    return report


def needs_torchvision(folder: Path) -> bool:
    """Whether ``AutoProcessor`` can't load the directory for want of torchvision in this environment.

    The families that also take videos need it for their video part alone: tokenizer and image processor load by
    ``AutoTokenizer`` and ``AutoImageProcessor``, and the whole by ``load_processor``.
    """
    if is_torchvision_available():
        return False
    try:
        return not hasattr(AutoProcessor.from_pretrained(folder), "image_processor")
    except ImportError:
        return True


@torch.no_grad()
def _merge(base: nn.Module, factors: Mapping[str, LowRank], dtype: torch.dtype) -> MergeReport:
    modules = dict(base.named_modules())
    lost = learnt = size = 0.0
    for layer, delta in factors.items():
        weight = modules[layer].weight
        assert isinstance(weight, torch.Tensor)
        before, change = weight.float(), delta.product().float().to(weight.device)
        merged = (before + change).to(dtype)
        lost += float((merged.float() - before - change).norm() ** 2)
        learnt += float(change.norm() ** 2)
        size += float(before.norm() ** 2)
        weight.copy_(merged)
    if learnt == 0:
        return MergeReport(1.0, 0.0)
    return MergeReport(1 - (lost / learnt) ** 0.5, (learnt / size) ** 0.5)


def _checkpoint_dtype(config: ModelConfig) -> torch.dtype:
    from transformers import AutoConfig

    declared = AutoConfig.from_pretrained(resolve_path(config.path), revision=config.revision or "main").dtype
    return declared if isinstance(declared, torch.dtype) else torch.bfloat16


def _copy_side_files(config: ModelConfig, folder: Path) -> None:
    source = Path(resolve_path(config.path))
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(config.path, revision=config.revision, allow_patterns=list(SIDE_FILES)))
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(WEIGHT_INDEX) and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
