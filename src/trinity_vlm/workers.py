"""Data-parallel workers over torch.distributed; one process is simply a world of one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(hours=12)
"""Workers wait this long for one another: the slowest one may be generating, or the main one evaluating."""


@dataclass(frozen=True, slots=True)
class Workers:
    """This process's place among ``world`` equal workers. Every collective is entered by every worker."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls) -> Workers:
        """Join the process group that torchrun describes (RANK, LOCAL_RANK ...); a world of one without it.

        On GPUs each worker takes its own; tensors on the CPU travel by gloo, those on a GPU by NCCL.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        return cls(dist.get_rank(), world)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_scalar(self, value: float) -> float:
        """Sum of one number over all workers, in float64."""
        if self.world == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total.item())

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each ``.grad`` by its sum over workers; a worker without gradients contributes zeros."""
        if self.world == 1:
            return
        chosen = list(parameters)
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in chosen])
        dist.all_reduce(flat)
        for parameter, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value in rank order, on every worker (picklable values only)."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def gather_to_main(self, value: Any) -> list[Any]:
        """Every worker's value in rank order on the main worker, nothing on the others (picklable values only)."""
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.is_main else None
        dist.gather_object(value, values)
        return values or []
