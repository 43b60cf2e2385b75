"""The worker of an engine whose weights are replaced while it runs: vLLM's CPU build then has to keep them.

That build packs the weights of linear layers for oneDNN when a model is loaded and drops the originals; a copy into
them would change nothing. Importing this module, in the worker's process only, makes it compute with the originals. On
a GPU nothing differs: there weights stay as they were loaded.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import vllm.model_executor.layers.utils as layers

from trinity_vlm.engine.vllm.worker import WorkerExtension

if not hasattr(layers, "dispatch_cpu_unquantized_gemm"):
    raise ImportError("this vLLM packs weights on a CPU elsewhere than in dispatch_cpu_unquantized_gemm")


def _keep(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


layers.dispatch_cpu_unquantized_gemm = _keep


class PlainWorkerExtension(WorkerExtension):
    """The same calls, over weights that can be replaced."""
