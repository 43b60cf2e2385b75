"""The worker of an engine whose weights are replaced while it runs: vLLM's CPU build then has to keep them.

That build packs the weights of linear layers for its kernels when a model is loaded and drops the originals; a copy
into them would change nothing. Importing this module, in the worker's process only, makes it compute with the
originals. On a GPU nothing is changed and nothing looked for: there weights stay as they were loaded.

Seen in vLLM 0.26 to 0.32: ``dispatch_cpu_unquantized_gemm(layer, remove_weight=True)``. To be removed once a linear
layer on a CPU keeps ``weight`` and follows changes of it, or can be told to pack a changed one again.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from vllm.platforms import current_platform

from trinity_vlm.engine.vllm.worker import WorkerExtension


def _keep(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


def _keep_weights_on_a_cpu() -> None:
    """Raises ImportError where vLLM packs weights elsewhere than known."""
    import vllm.model_executor.layers.utils as layers

    if not hasattr(layers, "dispatch_cpu_unquantized_gemm"):
        raise ImportError("this vLLM packs weights on a CPU elsewhere than in dispatch_cpu_unquantized_gemm")
    layers.dispatch_cpu_unquantized_gemm = _keep


if current_platform.is_cpu():
    _keep_weights_on_a_cpu()


class PlainWorkerExtension(WorkerExtension):
    """The same calls, over weights that can be replaced."""
