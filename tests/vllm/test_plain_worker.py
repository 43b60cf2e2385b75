"""The worker whose weights are replaced: what it changes of vLLM, and where."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch


def import_plain_worker(monkeypatch, layers, *, on_cpu):
    """The module, executed anew beside a vLLM of these parts alone."""
    names = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.platforms")
    modules = {name: ModuleType(name) for name in names} | {"vllm.model_executor.layers.utils": layers}
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    modules["vllm.model_executor.layers"].utils = layers
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.find_spec("trinity_vlm.engine.vllm.plain_worker")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_weights_are_kept_on_a_cpu_and_a_gpu_is_left_alone(monkeypatch):
    """On a GPU it doesn't matter what the CPU build's function is called; on a CPU a renamed one is an error."""
    known, renamed = ModuleType("utils"), ModuleType("utils")
    known.dispatch_cpu_unquantized_gemm = original = lambda layer, remove_weight: None
    assert import_plain_worker(monkeypatch, renamed, on_cpu=False).PlainWorkerExtension
    assert vars(renamed).keys() == vars(ModuleType("utils")).keys()
    import_plain_worker(monkeypatch, known, on_cpu=False)
    assert known.dispatch_cpu_unquantized_gemm is original
    with pytest.raises(ImportError, match="dispatch_cpu_unquantized_gemm"):
        import_plain_worker(monkeypatch, renamed, on_cpu=True)
    import_plain_worker(monkeypatch, known, on_cpu=True)
    layer = torch.nn.Linear(2, 3)
    known.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    torch.nn.init.zeros_(layer.weight)
    assert layer.cpu_linear(torch.ones(1, 2), layer.weight, None).tolist() == [[0, 0, 0]]
