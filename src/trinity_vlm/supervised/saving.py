"""A trained backbone as a Hugging Face directory that loads like the one it came from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from trinity_vlm.backbone import Backbone
from trinity_vlm.backbone.loading import resolve_path

_COMPANIONS = ("*token*", "*processor*", "chat_template*", "vocab*", "merges*", "*.model")


def save_directory(backbone: Backbone, source: str, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write weights (an adapter merged into them) and the tokenizer and processor files of ``source`` to ``out``.

    source: path or hub id the backbone was loaded from; its files are copied as they are, since a processor object
        built without torchvision can't be saved completely
    dtype: of the written weights; None keeps the model's. The backbone's adapter is gone afterwards.
    """
    out.mkdir(parents=True, exist_ok=True)
    model: Any = backbone.model
    if backbone.adapter_names:
        model = model.merge_and_unload()
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(out)
    directory = _local_files(source)
    for pattern in _COMPANIONS:
        for file in directory.glob(pattern):
            if file.is_file() and file.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(file, out / file.name)


def _local_files(source: str) -> Path:
    path = Path(resolve_path(source))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=list(_COMPANIONS)))
