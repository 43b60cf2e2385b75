"""The only place that imports vLLM in this process: lazily, with a clear error, and the arguments it starts with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch

from trinity_vlm.backbone import Backbone
from trinity_vlm.backbone.loading import counts_pixels, resolve_path
from trinity_vlm.config import ModelConfig
from trinity_vlm.engine_settings import (
    VLLM_CPU_CACHE_GIB,
    VllmConfig,
    vllm_adapter_slots,
    vllm_batch_tokens,
    vllm_block_tokens,
)
from trinity_vlm.errors import ConfigError, EngineError

WORKER_EXTENSION = "trinity_vlm.engine.vllm.worker.WorkerExtension"
PLAIN_WORKER_EXTENSION = "trinity_vlm.engine.vllm.plain_worker.PlainWorkerExtension"
_WAY_OUT = "install it with pip install -e '.[vllm]' in this checkout, or set engine.kind=transformers"
_KERNELS = Path(__file__).with_name("lora_kernels")  # written by benchmarks/lora_kernels.py
_UNPLANNED_SHARE = 0.45  # of the GPU for vLLM, where the model's shape gave no plan
# Set unless the user did: no usage reports, errors only, and no fork of a process that already runs threads.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def check_installed() -> None:
    """Raise EngineError, saying what to install, when there is no vLLM; imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(f"engine.kind=vllm: vLLM is not installed; {_WAY_OUT}")


def import_vllm() -> Any:
    """vLLM's names that this package uses; raises EngineError saying what to do when they can't be imported."""
    check_installed()
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        from vllm.config.lora import MaxLoRARanks
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(
            f"engine.kind=vllm: the installed vLLM can't be imported ({error}); version 0.32 is known "
            f"to work; {_WAY_OUT}"
        ) from error
    return SimpleNamespace(
        AsyncEngineArgs=AsyncEngineArgs,
        AsyncLLM=AsyncLLM,
        LoRARequest=LoRARequest,
        RequestOutputKind=RequestOutputKind,
        SamplingParams=SamplingParams,
        StructuredOutputsParams=StructuredOutputsParams,
        lora_ranks=sorted(get_args(MaxLoRARanks)),
    )


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """What vLLM has to make room for.

    rank: of vLLM's kernels, at least that of every layer of every adapter
    layer_kinds: last names of the adapted layers, for example q_proj
    """

    count: int
    rank: int
    layer_kinds: frozenset[str]


def kernel_options(device: torch.device) -> dict[str, str]:
    """The environment by which vLLM finds adapter-kernel options that were measured on this GPU, if any were."""
    if device.type != "cuda":
        return {}
    gpu = torch.cuda.get_device_name(device).replace(" ", "_").replace("-", "_")
    return {"VLLM_TUNED_CONFIG_FOLDER": str(_KERNELS)} if any(_KERNELS.glob(f"{gpu}_*.json")) else {}


def served_adapters(shapes: Mapping[str, Mapping[str, Sequence[int]]], allowed: Sequence[int]) -> ServedAdapters:
    """Of the shapes of all adapters' tensors by PEFT key; raises ConfigError for ranks beyond vLLM's ``allowed``."""
    downs = {name: {k: s[0] for k, s in tensors.items() if ".lora_A." in k} for name, tensors in shapes.items()}
    rank = served_rank({name: max(ranks.values()) for name, ranks in downs.items()}, allowed)
    kinds = {key.split(".lora_A.")[0].rpartition(".")[2] for ranks in downs.values() for key in ranks}
    return ServedAdapters(len(downs), rank, frozenset(kinds))


def served_rank(adapter_ranks: Mapping[str, int], allowed: Sequence[int]) -> int:
    """The smallest rank vLLM has kernels for that holds every adapter's largest; raises ConfigError beyond them."""
    rank = max(adapter_ranks.values())
    if rank > max(allowed):
        found = ", ".join(f"{name} {r}" for name, r in adapter_ranks.items())
        raise ConfigError(
            f"engine.kind=vllm: adapters of rank {found}, but vLLM takes ranks up to {max(allowed)}; lower lora.rank "
            "or ema.rank (ema.kind=dense has the rank of its matrices and can't be served)"
        )
    return min(r for r in allowed if r >= rank)


def engine_arguments(
    backbone: Backbone, model: ModelConfig, settings: VllmConfig, max_sequences: int, served: ServedAdapters | None
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs: the trainer's model, dtype, pixels and context, and room for the adapters.

    served: None for an engine whose weights are replaced instead
    """
    on_gpu = backbone.device.type == "cuda"
    arguments = {
        "model": resolve_path(model.path),
        "revision": model.revision,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "max_model_len": backbone.context,
        "max_num_seqs": max_sequences,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_processor_cache_gb": settings.mm_cache_gib,
        # Before temperature and filters, and without the ids that WorkerExtension takes out of the logits: the
        # probabilities that the trainer computes.
        "logprobs_mode": "raw_logprobs",
        "max_num_batched_tokens": vllm_batch_tokens(on_gpu, backbone.context, max_sequences),
        "structured_outputs_config": {"backend": "guidance"},
        "generation_config": "vllm",
        "worker_extension_cls": PLAIN_WORKER_EXTENSION if served is None else WORKER_EXTENSION,
        "disable_log_stats": True,
        **({} if served is None else _adapter_arguments(served, on_gpu)),
        **(_gpu_arguments(settings, max_sequences) if on_gpu else _cpu_arguments(settings)),
    }
    if counts_pixels(backbone.processor.image_processor):
        size = {"shortest_edge": model.min_pixels, "longest_edge": model.max_pixels}
        arguments["mm_processor_kwargs"] = {"size": size}
    return arguments


def _adapter_arguments(served: ServedAdapters, on_gpu: bool) -> dict[str, Any]:
    """Room for each adapter's current version and the one before it that is still in use, in slots or host memory."""
    return {
        "enable_lora": True,
        "max_lora_rank": served.rank,
        "max_loras": vllm_adapter_slots(served.count, on_gpu),
        "max_cpu_loras": 2 * served.count + 1,
        # Without it vLLM also wraps embeddings and output layer: a product of [tokens, rank] with [rank, vocabulary]
        # in every step, all zeros.
        "lora_target_modules": sorted(served.layer_kinds),
    }


def _cpu_arguments(settings: VllmConfig) -> dict[str, Any]:
    """Whole prompts in one step each: of a seeded prompt in two pieces vLLM's CPU build dies ("CPU Generator does not
    use offset", 0.32)."""
    cache = settings.kv_cache_gib or VLLM_CPU_CACHE_GIB
    return {
        "enforce_eager": True,
        "block_size": vllm_block_tokens(on_gpu=False),
        "kv_cache_memory_bytes": int(cache * 2**30),
        "enable_chunked_prefill": False,
    }


def _gpu_arguments(settings: VllmConfig, max_sequences: int) -> dict[str, Any]:
    """Captured decode steps without torch.compile: 2 % slower than with it, and minutes less to start."""
    sizes = [*(1, 2, 4, 8), *range(16, 128, 16), *range(128, max_sequences, 32)]
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [*(size for size in sizes if size < max_sequences), max_sequences],
    }
    return {
        **_cache_arguments(settings),
        "enforce_eager": settings.enforce_eager,
        **({} if settings.enforce_eager else {"compilation_config": compilation}),
    }


def _cache_arguments(settings: VllmConfig) -> dict[str, Any]:
    """Of an explicit size vLLM needs no share of the GPU, but would refuse to start unless its default one is free."""
    if settings.kv_cache_gib is None:
        return {"gpu_memory_utilization": _UNPLANNED_SHARE}
    return {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30)}


@contextmanager
def only_device(device: torch.device) -> Iterator[None]:
    """Processes started within the block see this GPU alone, as their first one; on a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[device.index or 0]
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
