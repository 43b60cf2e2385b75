"""When a step's backward passes run: after all episodes, or each episode's as soon as it ends.

Generation is bound by memory bandwidth, the update by arithmetic. The adapter does not change within a step and Eq. (3)
is a sum over rollouts that is divided once at the end, so both orders make the same update up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Self

import torch

from trinity_vlm.config import Config
from trinity_vlm.engine_settings import ENGINES_WITH_THEIR_OWN_MODEL
from trinity_vlm.trainer import Trainer
from trinity_vlm.types import Rollout


class StepUpdate(Protocol):
    """The update of one outer step. A context: leaving it early abandons the step's gradients."""

    async def take(self, rollouts: Sequence[Rollout]) -> None:
        """An episode ended with these retained rollouts."""
        ...

    def finish(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The optimizer step over ``rollouts``, all that were taken; metrics as ``Trainer.update``."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def overlaps(config: Config) -> bool:
    """Whether backward passes run while other episodes generate; ``auto``: where the engine has a model of its own,
    the layout is not the paper's, and a step makes one update."""
    if config.update.overlap != "auto":
        return config.update.overlap == "on"
    own_model = config.engine.kind in ENGINES_WITH_THEIR_OWN_MODEL and config.engine.layout != "paper"
    return own_model and config.update.updates_per_step == 1


def step_update(trainer: Trainer, step: int, config: Config) -> StepUpdate:
    """The update in the order that the configuration asks for."""
    return EarlyUpdate(trainer, step) if overlaps(config) else LateUpdate(trainer, step)


class LateUpdate:
    """Everything after the last episode: repeats bit for bit, and may share its model with the engine."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._trainer, self._step = trainer, step

    async def take(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing to do yet."""

    def finish(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """``Trainer.update`` of all rollouts."""
        return self._trainer.update(rollouts, self._step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class EarlyUpdate:
    """Backward passes in a thread of their own, one episode after the other, while other episodes generate.

    The engine must have a model of its own. Adds ``seconds/backward``: time in these passes.
    """

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._device = trainer.backbone.device
        self._num_threads = torch.get_num_threads()
        self._update = trainer.begin(step)
        self._thread = ThreadPoolExecutor(1, "update", initializer=self._enter_device)

    async def take(self, rollouts: Sequence[Rollout]) -> None:
        """Run their backward passes; returns when they are done."""
        if rollouts:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._update.add, rollouts)

    def finish(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The optimizer step; every rollout was taken already."""
        return self._update.finish() | {"seconds/backward": self._update.seconds}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _enter_device(self) -> None:
        """With this process's number of threads, for which the layers were compiled: a new thread takes what it finds
        at its first call, and vLLM sets 1 for a moment whenever it reads a picture."""
        torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
