"""AdamW with float32 master weights, warm-up and cosine, for low-precision models trained from text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trinity_vlm.errors import ConfigError, TrainingError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then cosine from ``lr`` to ``lr * floor`` at ``steps``; steps count optimizer updates."""

    lr: float
    steps: int
    warmup: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or not 0 <= self.floor <= 1 or not self.lr > 0:
            raise ConfigError(f"{self}: need lr > 0, steps >= 1, warmup >= 0 and floor in [0, 1]")

    def at(self, step: int) -> float:
        """The learning rate of update ``step``, counted from 0; the first is ``lr / warmup``, never 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.lr * max(self.floor, 0.5 * (1 + math.cos(math.pi * progress)))


class MasterAdamW:
    """AdamW on float32 copies of the parameters.

    bfloat16 weights lose updates below their rounding step; the float32 copies keep them, and the model's own
    weights are their rounded image. Vectors (norms, biases) get no weight decay. Float32 parameters are used directly.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        schedule: Schedule,
        weight_decay: float,
        betas: tuple[float, float],
        max_grad_norm: float,
    ) -> None:
        self.parameters = list(parameters)
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.step_count = 0
        self.master = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self.parameters]
        decay = [p for p in self.master if p.ndim >= 2]
        plain = [p for p in self.master if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        fused = all(p.is_cuda for p in self.master)
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], schedule.lr, betas=betas, fused=fused)

    def step(self) -> torch.Tensor:
        """Apply the gradients that stand in the model's parameters and clear them; returns their norm, unsynchronised.

        Raises TrainingError when a parameter has no gradient: it would silently stay as it was.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(grads) != len(self.parameters):
            missing = len(self.parameters) - len(grads)
            raise TrainingError(f"{missing} of {len(self.parameters)} trainable tensors got no gradient")
        for group in self._adamw.param_groups:
            group["lr"] = self.schedule.at(self.step_count)
        for master, grad in zip(self.master, grads, strict=True):
            master.grad = grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.master, self.max_grad_norm)
        self._adamw.step()
        self._publish()
        for parameter in self.parameters:
            parameter.grad = None
        self.step_count += 1
        return norm

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the master weights into the model."""
        pairs = [(p, m) for p, m in zip(self.parameters, self.master, strict=True) if p is not m]
        if pairs:
            torch._foreach_copy_([p.data for p, _ in pairs], [m.data for _, m in pairs])
