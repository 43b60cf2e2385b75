"""What runs inside vLLM's worker process: the ban of ids that are never sampled, the end when this process ends, and
the ways to its weights.

vLLM's own ways to ban don't serve here: ``logit_bias``, ``bad_words`` and ``allowed_token_ids`` act after the raw
log-probabilities were taken, so that these would be normalised over other ids than the trainer's, and each request
would carry its list. A hook on the module that makes the logits acts before everything else: greedy choice, filters
and reported log-probabilities alike. It costs one ``index_fill_`` per step.

vLLM's processes survive a killed parent and keep its GPU memory. The engine holds a file lock for as long as it lives;
a thread in the worker waits for that lock.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trinity_vlm.engine.vllm.sharing import export_tensors, import_tensors, named_weights


def ban_in_logits(model: nn.Module, token_ids: Sequence[int]) -> int:
    """Hold the logits of ``token_ids`` at -inf in every module of ``model`` that makes logits; returns how many.

    With adapters such a module wraps another one without calling it as a module, so both get the hook.
    """
    makers = [m for m in model.modules() if type(m).__name__ in ("LogitsProcessor", "LogitsProcessorWithLoRA")]
    for maker in makers:
        maker.register_forward_hook(_banning(token_ids))
    return len(makers)


def _banning(token_ids: Sequence[int]) -> Callable[[nn.Module, Any, Tensor | None], Tensor | None]:
    ids = torch.tensor(sorted(token_ids), dtype=torch.long)

    def banned(module: nn.Module, inputs: Any, logits: Tensor | None) -> Tensor | None:
        nonlocal ids
        if logits is None:  # a tensor-parallel rank that doesn't gather them
            return None
        ids = ids.to(logits.device)
        return logits.index_fill_(-1, ids, float("-inf"))

    return banned


def end_with(lock: Path, owner: int) -> None:
    """Wait until the process ``owner`` lets go of the lock, then end vLLM's: this one and the one that started it,
    unless that was the owner itself."""
    parent = os.getppid()
    with lock.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
    if parent != owner:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class WorkerExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``; called through ``collective_rpc``."""

    model_runner: Any
    _trinity_buffer: Tensor

    def trinity_ban(self, token_ids: list[int]) -> int:
        """Never sample these ids from here on; returns the number of modules that were hooked."""
        return ban_in_logits(self.model_runner.get_model(), token_ids)

    def trinity_end_with(self, lock: str, owner: int) -> None:
        """Do not outlive the process ``owner``, which holds the lock."""
        threading.Thread(target=end_with, args=(Path(lock), owner), daemon=True).start()

    def trinity_shapes(self) -> dict[str, list[int]]:
        """Shapes of all weights by plain name."""
        return {name: list(weight.shape) for name, weight in self._trinity_weights().items()}

    def trinity_export(self) -> bytes:
        """Handles of all weights, which this process keeps as long as it lives."""
        return export_tensors(self._trinity_weights())

    def trinity_open_buffer(self, handles: bytes) -> None:
        """Take from this buffer of the owner's in ``trinity_take``."""
        device = next(iter(self._trinity_weights().values())).device
        (self._trinity_buffer,) = import_tensors(handles, device).values()

    def trinity_take(self, parts: list[tuple[str, int, int, int]]) -> None:
        """Copy weights out of the buffer: name, first row, number of rows, where they begin in the buffer."""
        weights = self._trinity_weights()
        for name, start, rows, offset in parts:
            target = weights[name][start : start + rows]
            target.copy_(self._trinity_buffer[offset : offset + target.numel()].view(target.shape))
        if self._trinity_buffer.is_cuda:
            torch.cuda.synchronize(self._trinity_buffer.device)

    def _trinity_weights(self) -> dict[str, Tensor]:
        return named_weights(self.model_runner.get_model())
