"""The supervised loop, batches in and steps out: for the format warm-up and the embedded checkpoint's build."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import ModelConfig
from trinity_vlm.errors import TrainingError
from trinity_vlm.supervised.batches import PackedBatch, packed_batches
from trinity_vlm.supervised.equal_images import completion_logprobs
from trinity_vlm.supervised.examples import ExampleSource
from trinity_vlm.supervised.optimizer import MasterAdamW, Schedule
from trinity_vlm.types import POLICY

LOSS_WINDOW = 50


@dataclass(frozen=True, slots=True)
class SupervisedSettings:
    """How to train. ``report_every``: optimizer steps between two progress reports; each waits for the device."""

    schedule: Schedule
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    num_workers: int = 0
    report_every: int = 20


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands. ``loss``: mean nat per completion token over the last steps; seconds since the first step,
    pauses in ``on_progress`` left out; ``data_wait`` is the part of them spent waiting for batches."""

    step: int
    steps: int
    examples: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    data_wait: float

    @property
    def examples_per_second(self) -> float:
        return self.examples / max(self.seconds, 1e-9)


def train_supervised(
    backbone: Backbone,
    source: ExampleSource,
    model: ModelConfig,
    settings: SupervisedSettings,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Train the backbone's trainable parameters (all of them, or its policy adapter) on every batch of ``source`` once.

    Parameters that the caller has frozen (``requires_grad`` off) stay as they are.

    The loss is the mean negative log-likelihood of a batch's completion tokens, the end-of-turn token included.
    ``model`` says how worker processes load their tokenizer and processor. ``on_progress`` may use the backbone, for
    an evaluation for instance. Returns the last progress; raises TrainingError on a non-finite loss.
    """
    batches = packed_batches(source, model, backbone, settings.num_workers)
    packed = next(batches, None)
    if packed is None:
        raise TrainingError("the source holds no batch: nothing to train on")
    run = _Run(backbone, settings, len(source))
    while packed is not None:
        run.step(packed)
        if run.optimizer.step_count % settings.report_every == 0 or run.optimizer.step_count == len(source):
            progress = run.progress()
            with run.clock.paused():
                on_progress(progress)
        with run.clock.waiting():
            packed = next(batches, None)
    backbone.model.eval()
    return progress


class _Run:
    """One training run's optimizer, clock and recent losses."""

    def __init__(self, backbone: Backbone, settings: SupervisedSettings, steps: int) -> None:
        self._backbone = backbone
        self._adapter = POLICY if backbone.adapter_names else None
        self._steps = steps
        self._losses: deque[torch.Tensor] = deque(maxlen=LOSS_WINDOW)
        self._examples = 0
        self._norm = torch.zeros(())
        self.clock = _Clock()
        self.optimizer = MasterAdamW(
            [p for _, p in backbone.trainable_parameters() if p.requires_grad],
            settings.schedule,
            settings.weight_decay,
            settings.betas,
            settings.max_grad_norm,
        )

    def step(self, packed: PackedBatch) -> None:
        """One forward, backward and update; nothing here waits for the device on purpose."""
        logprobs, mask = completion_logprobs(self._backbone, packed, self._adapter)
        loss = -logprobs.sum() / mask.sum()
        loss.backward()
        self._norm = self.optimizer.step()
        self._losses.append(loss.detach())
        self._examples += len(packed.image_of_row)

    def progress(self) -> Progress:
        """Raises TrainingError when the recent losses aren't finite."""
        mean = float(torch.stack(list(self._losses)).mean())
        step = self.optimizer.step_count
        if not math.isfinite(mean):
            raise TrainingError(f"step {step}: the loss is {mean}; lower the learning rate")
        return Progress(
            step,
            self._steps,
            self._examples,
            mean,
            self.optimizer.schedule.at(step - 1),
            float(self._norm),
            self.clock.seconds,
            self.clock.waited,
        )


class _Clock:
    """Seconds of training since it was made, pauses left out; ``waited`` of them went by without data."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.waited = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.waited += time.perf_counter() - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._start += time.perf_counter() - before
