"""The update: retained rollouts of both roles in, one (or a few) optimizer steps out. The loop's only optimizer.

It reads token ids, advantages and log-probabilities, never text. Gradients of micro-batches are summed against the
global number of retained rollouts, so that micro-batching and the number of workers don't change the update (Eq. 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trinity_vlm.backbone import Backbone, Batch, EncodedPrompt
from trinity_vlm.checkpoint import load_optimizer, optimizer_tensors
from trinity_vlm.config import UpdateConfig
from trinity_vlm.errors import TrainingError
from trinity_vlm.objective import ObjectiveSums, gspo_loss
from trinity_vlm.types import POLICY, Role, Rollout
from trinity_vlm.workers import Workers

SHARED_ROW_TOKENS = 1024
"""Longest row that shares a prompt: attention within a row costs the square of its length."""

LENGTH_SPREAD = 1.5
"""A micro-batch's longest row is at most this many times its shortest: the rest would be padding."""


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


@dataclass(frozen=True, slots=True)
class _Item:
    """A rollout ready for the forward pass; ``rollout_logprobs`` [T] on the CPU, None: take the forward's own."""

    rollout: Rollout
    encoded: EncodedPrompt
    rollout_logprobs: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.encoded.input_ids) + len(self.rollout.completion.token_ids)


@dataclass(frozen=True, slots=True)
class _Pack:
    """Rollouts of one prompt in one row; ``length`` in tokens, the prompt counted once."""

    items: tuple[_Item, ...]
    length: int


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
        lr = learning_rate(self.config.lr, step, self.total_steps, self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        role = trained_role(self.config, step)
        distinct = {id(r.prompt): r.prompt for r in rollouts}
        prompts = {key: self.backbone.encode(prompt) for key, prompt in distinct.items()}
        items = [_Item(r, _checked(r, prompts[id(r.prompt)])) for r in rollouts if role is None or r.role is role]
        metrics = {"lr": lr, "trained_rollouts": self.workers.sum_scalar(len(items)), "grad_norm": 0.0}
        if metrics["trained_rollouts"] == 0:
            return metrics | {"updates": 0.0}
        items = self._with_rollout_logprobs(items)
        sums, gaps = ObjectiveSums(), _GapSums()
        norms: list[float] = []
        for part in _split(items, self.config.updates_per_step):
            part_sums, part_gaps, norm = self._optimizer_step(part, step)
            sums = sums + part_sums
            gaps = gaps if norms else part_gaps
            norms += [] if norm is None else [norm]
        totals = self.workers.gather((sums, gaps))
        metrics |= sum((s for s, _ in totals), ObjectiveSums()).means()
        metrics |= sum((g for _, g in totals), _GapSums()).means()
        return metrics | {"grad_norm": max(norms), "updates": float(len(norms))}

    def _optimizer_step(self, items: Sequence[_Item], step: int) -> tuple[ObjectiveSums, _GapSums, float | None]:
        count = self.workers.sum_scalar(len(items))
        normalizer = count if self.config.loss_reduction == "global" else len(items) * self.workers.world
        self.optimizer.zero_grad(set_to_none=True)
        sums, gaps = ObjectiveSums(), _GapSums()
        for micro in self._microbatches(items):
            micro_sums, micro_gaps = self._backward(micro, max(1.0, normalizer), step)
            sums, gaps = sums + micro_sums, gaps + micro_gaps
        if count == 0:
            return sums, gaps, None
        self.workers.sum_gradients(self.parameters)
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                [p for p in self.parameters if p.grad is not None], self.config.max_grad_norm
            )
        )
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {step + 1}: the gradient norm is {norm}; nothing was saved. Resume from the last checkpoint "
                "with a lower update.lr, or look at the step's episodes for degenerate completions"
            )
        self.optimizer.step()
        return sums, gaps, norm

    def _backward(self, packs: Sequence[_Pack], normalizer: float, step: int) -> tuple[ObjectiveSums, _GapSums]:
        items = [item for pack in packs for item in pack.items]
        batch = self._collate(packs)
        trainer_logprobs = self.backbone.completion_logprobs(batch, POLICY)
        mask = batch.completion_mask
        rollout_logprobs = trainer_logprobs.detach()
        if items[0].rollout_logprobs is not None:
            rollout_logprobs = _pad([i.rollout_logprobs for i in items if i.rollout_logprobs is not None], mask)
        loss, sums = gspo_loss(
            trainer_logprobs,
            rollout_logprobs,
            mask,
            torch.tensor([i.rollout.advantage for i in items], device=mask.device),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            regularizer=self.config.regularizer,
            normalizer=normalizer,
        )
        if not torch.isfinite(loss):
            raise TrainingError(
                f"step {step + 1}: the loss is {loss.item()}; nothing was saved. Resume from the last checkpoint "
                "with a lower update.lr, or look at the step's episodes for degenerate completions"
            )
        loss.backward()
        return sums, _GapSums.measure(trainer_logprobs.detach(), items, mask)

    @torch.no_grad()
    def _with_rollout_logprobs(self, items: list[_Item]) -> list[_Item]:
        """Attach log pi_old: the engine's, or the current weights' when several updates will move away from them."""
        if self.config.old_logprobs == "engine":
            return [_Item(i.rollout, i.encoded, _engine_logprobs(i.rollout)) for i in items]
        if self.config.updates_per_step == 1:
            return items
        done = []
        for micro in self._microbatches(items):
            logprobs = self.backbone.completion_logprobs(self._collate(micro), POLICY).cpu()
            done += [
                _Item(item.rollout, item.encoded, row[: len(item.rollout.completion.token_ids)])
                for item, row in zip([i for pack in micro for i in pack.items], logprobs, strict=True)
            ]
        position = {id(item.rollout): i for i, item in enumerate(items)}
        return sorted(done, key=lambda item: position[id(item.rollout)])

    def _microbatches(self, items: Sequence[_Item]) -> Iterator[list[_Pack]]:
        """Rows of similar length side by side, at most ``tokens_per_microbatch`` padded tokens (one row at least)."""
        batch: list[_Pack] = []
        for pack in sorted(self._packs(items), key=lambda p: p.length, reverse=True):
            too_many = batch and batch[0].length * (len(batch) + 1) > self.config.tokens_per_microbatch
            if too_many or (batch and batch[0].length > LENGTH_SPREAD * pack.length):
                yield batch
                batch = []
            batch.append(pack)
        if batch:
            yield batch

    def _packs(self, items: Sequence[_Item]) -> list[_Pack]:
        """A group's rollouts share a row, and so the computation of their prompt, while the row stays short."""
        packs: dict[tuple[object, ...], list[_Pack]] = {}
        for item in items:
            same = packs.setdefault((item.encoded.image_key, item.encoded.input_ids), [])
            shared = same[-1].length + len(item.rollout.completion.token_ids) if same else 0
            if same and self.backbone.shares_prompts and shared <= SHARED_ROW_TOKENS:
                same[-1] = _Pack((*same[-1].items, item), shared)
            else:
                same.append(_Pack((item,), item.length))
        return [pack for same in packs.values() for pack in same]

    def _collate(self, packs: Sequence[_Pack]) -> Batch:
        sequences = [[i.rollout.completion.token_ids for i in pack.items] for pack in packs]
        prompts = [pack.items[0].encoded for pack in packs]
        if all(len(completions) == 1 for completions in sequences):
            return self.backbone.collate([(p, c[0]) for p, c in zip(prompts, sequences, strict=True)], pad="right")
        return self.backbone.collate_shared(list(zip(prompts, sequences, strict=True)))

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Optimizer tensors and plain values, to be given back to :meth:`load_state`."""
        return optimizer_tensors(self.optimizer, self.names)

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned, bit for bit."""
        load_optimizer(self.optimizer, self.names, tensors, meta)


@dataclass(frozen=True, slots=True)
class _GapSums:
    """|engine - trainer| log-probability of the same tokens, in nat: additive over micro-batches and workers."""

    total: float = 0.0
    largest: float = 0.0
    tokens: int = 0

    @classmethod
    def measure(cls, trainer_logprobs: torch.Tensor, items: Sequence[_Item], mask: torch.Tensor) -> _GapSums:
        if any(i.rollout.completion.logprobs is None for i in items):
            return cls()
        gap = (trainer_logprobs - _pad([_engine_logprobs(i.rollout) for i in items], mask)).abs() * mask
        return cls(float(gap.sum()), float(gap.max()), int(mask.sum()))

    def __add__(self, other: _GapSums) -> _GapSums:
        return _GapSums(self.total + other.total, max(self.largest, other.largest), self.tokens + other.tokens)

    def means(self) -> dict[str, float]:
        if self.tokens == 0:
            return {}
        return {"engine_gap": self.total / self.tokens, "engine_gap_max": self.largest}


def _checked(rollout: Rollout, encoded: EncodedPrompt) -> EncodedPrompt:
    """The prompt as the trainer sees it, refused unless the engine saw the same tokens."""
    if encoded.input_ids != rollout.completion.prompt_token_ids:
        raise TrainingError(
            f"rollout {rollout.image_uid}/{rollout.role}/{rollout.slot}: the engine saw "
            f"{len(rollout.completion.prompt_token_ids)} prompt tokens, the trainer {len(encoded.input_ids)}; "
            "engine and trainer must use the same processor and pixel bounds"
        )
    return encoded


def _engine_logprobs(rollout: Rollout) -> torch.Tensor:
    if rollout.completion.logprobs is None:
        raise TrainingError(
            "update.old_logprobs=engine needs log-probabilities, but the engine returned none; use recomputed"
        )
    return torch.tensor(rollout.completion.logprobs, dtype=torch.float32)


def _pad(rows: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """[B, T] float32 on the mask's device from rows of their own lengths."""
    padded = torch.zeros(mask.shape, dtype=torch.float32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded.to(mask.device)


def _split(items: Sequence[_Item], parts: int) -> list[list[_Item]]:
    """Every ``parts``-th item, so that each part holds rollouts of every group; empty parts are kept, since every
    worker must make the same number of collective calls."""
    return [list(items[i::parts]) for i in range(parts)]
