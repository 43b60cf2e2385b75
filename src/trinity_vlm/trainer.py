"""The update: retained rollouts of both roles in, one (or a few) optimizer steps out. The loop's only optimizer.

It reads token ids, advantages and log-probabilities, never text. Gradients of micro-batches are summed and divided
once, by the global number of retained rollouts, so that neither micro-batching nor the number of workers nor the moment
at which a rollout's backward pass runs changes the update (Eq. 3).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trinity_vlm.backbone import Backbone, Batch, EncodedPrompt
from trinity_vlm.checkpoint import load_optimizer, optimizer_tensors
from trinity_vlm.config import UpdateConfig
from trinity_vlm.errors import TrainingError
from trinity_vlm.machine import free_memory
from trinity_vlm.microbatches import SHORT_ROW_TOKENS, Item, Pack, collate_packs, microbatches, packs
from trinity_vlm.objective import ObjectiveSums, gspo_loss, importance_weights
from trinity_vlm.types import POLICY, Role, Rollout
from trinity_vlm.workers import Workers

_NO_LOGPROBS = "this needs the engine's log-probabilities, but the engine returned none; use the default"

USABLE_MEMORY = 0.85
"""Share of the free memory that one micro-batch's activations may be planned to take."""

_OUT_OF_MEMORY = (
    "the update ran out of GPU memory; nothing was saved. Resume from the last checkpoint with "
    "update.gradient_checkpointing=on, a smaller update.tokens_per_microbatch or a smaller engine.vllm.kv_cache_gib"
)


def learning_rate(base: float, step: int, total: int, warmup: int) -> float:
    """Linear warm-up over ``warmup`` outer steps, then cosine to 0 at ``total`` (A.2; the floor of 0 is our choice).

    The first step trains at ``base / warmup``; the warm-up never takes more than the whole run.
    """
    warmup = min(warmup, total)
    if step < warmup:
        return base * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return base * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def trained_role(config: UpdateConfig, step: int) -> Role | None:
    """The role whose rollouts are used at this step; None: both. Alternating begins with the Solver (Appendix D)."""
    if config.schedule == "joint":
        return None
    return (Role.SOLVER, Role.QUESTIONER)[(step // config.alternate_every) % 2]


class Trainer:
    """AdamW on the policy adapter.

    With one update per step and recomputed log-probabilities, log pi_old is the same forward pass's own detached
    value: the ratio is exactly 1, the clip never binds and the regularizer's gradient is 0. Both act with
    engine log-probabilities or several updates per step.
    """

    def __init__(
        self, backbone: Backbone, config: UpdateConfig, total_steps: int, workers: Workers | None = None
    ) -> None:
        self.backbone = backbone
        self.config = config
        self.total_steps = total_steps
        self.workers = workers or Workers()
        self._usable_memory = USABLE_MEMORY
        self._largest_batch = 0
        if config.compile_layers and backbone.device.type == "cuda":
            backbone.compile_layers()
        self.names, self.parameters = map(list, zip(*backbone.trainable_parameters(), strict=True))
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )

    def update(self, rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
        """Train on this worker's retained rollouts; every worker calls it, with or without any.

        Returns metrics over all workers. Nothing retained anywhere: no optimizer step. Raises TrainingError on a
        non-finite loss or gradient, before the optimizer step that it would spoil.
        """
        items = self._with_rollout_logprobs(self._items(rollouts, step))
        parts = [_Sums() for _ in range(self.config.updates_per_step)]
        norms = []
        for index, part in enumerate(parts):
            self._zero_gradients()
            self._accumulate(items[index :: len(parts)], part, step)
            norms += self._apply(part, step)
        return self._metrics(parts, norms, step)

    def begin(self, step: int) -> OpenUpdate:
        """The same update in pieces, as rollouts become known; only with one update per step.

        The adapter does not change within a step and Eq. (3) is a sum over rollouts that is divided once at the end, so
        a finished episode's backward pass may run while others still generate.
        """
        if self.config.updates_per_step > 1:
            raise ValueError(f"updates_per_step={self.config.updates_per_step}: later updates need the earlier ones")
        self._zero_gradients()
        return OpenUpdate(self, step)

    def _items(self, rollouts: Sequence[Rollout], step: int) -> list[Item]:
        """Those of the role that trains at this step, encoded."""
        role = trained_role(self.config, step)
        distinct = {id(r.prompt): r.prompt for r in rollouts}
        prompts = {key: self.backbone.encode(prompt) for key, prompt in distinct.items()}
        return [Item(r, _checked(r, prompts[id(r.prompt)])) for r in rollouts if role is None or r.role is role]

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, items: Sequence[Item], sums: _Sums, step: int) -> None:
        """Add the gradients of sum_o L_o (Eq. 3, not divided yet) and its statistics."""
        try:
            for micro in self._microbatches(items):
                self._backward(micro, sums, step)
        except torch.OutOfMemoryError as error:
            raise TrainingError(f"step {step + 1}: {_OUT_OF_MEMORY}") from error

    def _apply(self, sums: _Sums, step: int) -> list[float]:
        """Divide the gradients, sum them over workers, clip, step; the gradient's norm, or nothing without rollouts."""
        mine = sums.objective.num_rollouts
        count = self.workers.sum_scalar(mine)
        if count == 0:
            return []
        normalizer = count if self.config.loss_reduction == "global" else max(1, mine) * self.workers.world
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(normalizer)
        self.workers.sum_gradients(self.parameters)
        present = [p for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(present, self.config.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingError(_not_finite(step, "gradient norm", norm))
        self._set_learning_rate(step)
        self.optimizer.step()
        return [norm]

    def _set_learning_rate(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.config.lr, step, self.total_steps, self.config.warmup_steps)

    def _metrics(self, parts: Sequence[_Sums], norms: Sequence[float], step: int) -> dict[str, float]:
        everyones = [part for parts in self.workers.gather(list(parts)) for part in parts]
        objective = sum((part.objective for part in everyones), ObjectiveSums())
        metrics: dict[str, float] = {"lr": self._learning_rate(step), "trained_rollouts": objective.num_rollouts}
        metrics |= {"grad_norm": max(norms, default=0.0), "updates": float(len(norms))}
        metrics["memory/retries"] = float(sum(part.retries for part in everyones))
        if not norms:
            return metrics
        # Engine and trainer are compared before the first optimizer step moves the weights.
        firsts = everyones[:: len(parts)]
        gaps = sum((part.gaps for part in firsts), GapSums())
        return metrics | objective.means() | gaps.means()

    def _backward(self, batch: Sequence[Pack], sums: _Sums, step: int) -> None:
        items = [item for pack in batch for item in pack.items]
        collated = collate_packs(self.backbone, batch)
        trainer_logprobs = self._forward(collated, sums)
        mask = collated.completion_mask
        rollout_logprobs = trainer_logprobs.detach()
        if items[0].rollout_logprobs is not None:
            rollout_logprobs = _pad([i.rollout_logprobs for i in items if i.rollout_logprobs is not None], mask)
        engine_logprobs = _engine_logprobs(items, mask)
        loss, objective = gspo_loss(
            trainer_logprobs,
            rollout_logprobs,
            mask,
            torch.tensor([i.rollout.advantage for i in items], device=mask.device),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            regularizer=self.config.regularizer,
            weights=self._importance(rollout_logprobs, engine_logprobs, mask),
        )
        if not torch.isfinite(loss):
            raise TrainingError(_not_finite(step, "loss", loss.item()))
        loss.backward()
        sums.objective = sums.objective + objective
        if engine_logprobs is not None:
            sums.gaps = sums.gaps + GapSums.measure(trainer_logprobs.detach(), engine_logprobs, mask)

    def _forward(self, collated: Batch, sums: _Sums) -> Tensor:
        """Log-probabilities [S, T] with gradient; as few layers keep only their input as memory asks for.

        What fits is an estimate. A forward pass that does run out of memory is repeated with every layer recomputed,
        and later ones plan with less.
        """
        self._make_room(collated.input_ids.numel())
        backbone, setting = self.backbone, self.config.gradient_checkpointing
        if setting != "auto":
            backbone.set_gradient_checkpointing(setting == "on")
            return backbone.completion_logprobs(collated, POLICY)
        backbone.fit_checkpointing(collated, self._usable_memory * free_memory(backbone.device))
        with suppress(torch.OutOfMemoryError):
            return backbone.completion_logprobs(collated, POLICY)
        self._usable_memory *= 0.8
        sums.retries += 1
        torch.cuda.empty_cache()
        backbone.set_gradient_checkpointing(True)
        return backbone.completion_logprobs(collated, POLICY)

    def _make_room(self, tokens: int) -> None:
        """Before a batch larger than all before it: blocks that the allocator kept of smaller ones are too small for
        its tensors, and once they are cut up for less they can't be given back."""
        if tokens > self._largest_batch:
            self._largest_batch = tokens
            torch.cuda.empty_cache()

    def _importance(self, rollout: Tensor, engine: Tensor | None, mask: Tensor) -> Tensor | None:
        if self.config.importance_cap is None:
            return None
        if engine is None:
            raise TrainingError(f"update.importance_cap={self.config.importance_cap}: {_NO_LOGPROBS}")
        return importance_weights(rollout, engine, mask, self.config.importance_cap)

    @torch.no_grad()
    def _with_rollout_logprobs(self, items: list[Item]) -> list[Item]:
        """Attach log pi_old: the engine's, or the current weights' when several updates will move away from them."""
        if self.config.old_logprobs == "engine":
            return [replace(i, rollout_logprobs=_logprobs_of(i.rollout)) for i in items]
        if self.config.updates_per_step == 1:
            return items
        found: dict[int, Tensor] = {}
        for micro in self._microbatches(items):
            rows = self.backbone.completion_logprobs(collate_packs(self.backbone, micro), POLICY).cpu()
            for item, row in zip([i for pack in micro for i in pack.items], rows, strict=True):
                found[id(item)] = row[: item.num_tokens]
        return [replace(item, rollout_logprobs=found[id(item)]) for item in items]

    def _microbatches(self, items: Sequence[Item]) -> Iterator[list[Pack]]:
        longest = self.config.tokens_per_microbatch if self.backbone.shares_prompts else 0
        short = SHORT_ROW_TOKENS if self.backbone.shares_prompts else self.config.tokens_per_microbatch
        return microbatches(packs(items, longest), self.config.tokens_per_microbatch, short)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Optimizer tensors and plain values, to be given back to :meth:`load_state`."""
        return optimizer_tensors(self.optimizer, self.names)

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned, bit for bit."""
        load_optimizer(self.optimizer, self.names, tensors, meta)


class OpenUpdate:
    """One step's update in the making; see ``Trainer.begin``. ``seconds`` is the time spent in backward passes."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._trainer, self._step = trainer, step
        self._sums = _Sums()
        self.seconds = 0.0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Run the backward passes of these rollouts; from one thread at a time. Raises as ``Trainer.update`` does."""
        start = time.perf_counter()
        trainer = self._trainer
        items = trainer._with_rollout_logprobs(trainer._items(rollouts, self._step))
        trainer._accumulate(items, self._sums, self._step)
        self.seconds += time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """The optimizer step over everything added on all workers; metrics and errors as ``Trainer.update``."""
        norms = self._trainer._apply(self._sums, self._step)
        return self._trainer._metrics([self._sums], norms, self._step)


@dataclass(frozen=True, slots=True)
class GapSums:
    """|engine - trainer| log-probability of the same tokens, in nat: additive over micro-batches and workers."""

    total: float = 0.0
    largest: float = 0.0
    tokens: int = 0

    @classmethod
    def measure(cls, trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> GapSums:
        """Over the tokens of ``mask``; all three are [S, T]."""
        gap = (trainer_logprobs - engine_logprobs).abs() * mask
        return cls(float(gap.sum()), float(gap.max()), int(mask.sum()))

    def __add__(self, other: GapSums) -> GapSums:
        return GapSums(self.total + other.total, max(self.largest, other.largest), self.tokens + other.tokens)

    def means(self) -> dict[str, float]:
        """Mean and maximum over tokens; nothing over none."""
        if self.tokens == 0:
            return {}
        return {"engine_gap": self.total / self.tokens, "engine_gap_max": self.largest}


@dataclass(slots=True)
class _Sums:
    """What has been accumulated towards one optimizer step on this worker; ``retries``: passes that had to be repeated,
    for they ran out of memory."""

    objective: ObjectiveSums = field(default_factory=ObjectiveSums)
    gaps: GapSums = field(default_factory=GapSums)
    retries: int = 0


def _not_finite(step: int, what: str, value: float) -> str:
    return (
        f"step {step + 1}: the {what} is {value}; nothing was saved. Resume from the last checkpoint "
        "with a lower update.lr, or look at the step's episodes for degenerate completions"
    )


def _checked(rollout: Rollout, encoded: EncodedPrompt) -> EncodedPrompt:
    """The prompt as the trainer sees it, refused unless the engine saw the same tokens."""
    if encoded.input_ids != rollout.completion.prompt_token_ids:
        raise TrainingError(
            f"rollout {rollout.image_uid}/{rollout.role}/{rollout.slot}: the engine saw "
            f"{len(rollout.completion.prompt_token_ids)} prompt tokens, the trainer {len(encoded.input_ids)}; "
            "engine and trainer must use the same processor and pixel bounds"
        )
    return encoded


def _logprobs_of(rollout: Rollout) -> Tensor:
    if rollout.completion.logprobs is None:
        raise TrainingError(f"update.old_logprobs=engine: {_NO_LOGPROBS}")
    return torch.tensor(rollout.completion.logprobs, dtype=torch.float32)


def _engine_logprobs(items: Sequence[Item], mask: Tensor) -> Tensor | None:
    """[S, T], or None when the engine gave none."""
    if any(item.rollout.completion.logprobs is None for item in items):
        return None
    return _pad([_logprobs_of(item.rollout) for item in items], mask)


def _pad(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    """[S, T] float32 on the mask's device from rows of their own lengths."""
    padded = torch.zeros(mask.shape, dtype=torch.float32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded.to(mask.device)
