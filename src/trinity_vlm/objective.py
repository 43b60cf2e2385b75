"""The sequence-level clipped objective, Eq. (3) of A.3 (GSPO's ratio, Section 2).

For a rollout o of |o| completion tokens with token log-ratios l_t = log pi_theta - log pi_rollout:

    rho_o = exp(mean_t l_t)
    L_o   = -min(rho_o A_o, clip(rho_o, 1 - clip_low, 1 + clip_high) A_o)
            + regularizer * mean_t(exp(l_t) - l_t - 1)                                       (3)
    loss  = sum_o L_o

to be divided, once, by the number of retained rollouts of the whole update: gradients of parts (micro-batches, workers)
add up to those of one big batch. Gradients flow through pi_theta only.

Where the tokens were drawn by an engine whose numerics differ from the trainer's, the surrogate may be weighted by

    w_o = min(exp(mean_t(log pi_rollout - log pi_engine)), cap)

the length-normalized ratio of the two, bounded above (off by default; not in the paper).

Degenerate cases: on-policy (l_t = 0) the ratio is exactly 1, nothing is clipped, the regularizer and its gradient are 0
and the gradient is the policy gradient -A mean_t grad log pi; a rollout without tokens is an error.

Shape legend: B rollouts, T padded completion length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ObjectiveSums:
    """Statistics of any set of rollouts; ``a + b`` are those of the union. ``ObjectiveSums()`` is the empty set.

    loss, ratio, clipped, kl: sums over rollouts of L_o, rho_o, [the clip decided], mean_t(exp(l_t) - l_t - 1)
    ratio_max: the largest rho_o, combined by max
    weight: sum of w_o, 0 where the surrogate is not weighted
    """

    loss: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    weight: float = 0.0
    num_rollouts: int = 0
    num_tokens: int = 0

    def __add__(self, other: ObjectiveSums) -> ObjectiveSums:
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return ObjectiveSums(**(added | {"ratio_max": max(self.ratio_max, other.ratio_max)}))

    def means(self) -> dict[str, float]:
        """Means over rollouts, the maximum and the counts; an empty set has its counts only.

        ``kl`` estimates KL(pi_rollout || pi_theta) per token: the samples come from pi_rollout.
        """
        counts: dict[str, float] = {"num_rollouts": self.num_rollouts, "num_tokens": self.num_tokens}
        if not self.num_rollouts:
            return counts
        if self.weight:
            counts["importance_weight"] = self.weight / self.num_rollouts
        return counts | {
            "loss": self.loss / self.num_rollouts,
            "ratio_mean": self.ratio / self.num_rollouts,
            "ratio_max": self.ratio_max,
            "clip_fraction": self.clipped / self.num_rollouts,
            "kl": self.kl / self.num_rollouts,
        }


def gspo_loss(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    regularizer: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, ObjectiveSums]:
    """Eq. (3) of one micro-batch: the scalar loss to call ``backward`` on, and its additive statistics.

    trainer_logprobs [B, T]: log pi_theta of the completion tokens, with gradient
    rollout_logprobs [B, T]: log pi_rollout of the same tokens; treated as constant
    mask [B, T]: true on completion tokens; whatever stands elsewhere is ignored, NaN and infinity included
    advantages [B]
    weights [B]: of the surrogate (``importance_weights``); None: 1

    Computed in float32, or float64 when trainer_logprobs are. Raises ValueError for mismatched shapes and a rollout
    without completion tokens.
    """
    _check(trainer_logprobs, rollout_logprobs, mask, advantages)
    dtype = torch.promote_types(trainer_logprobs.dtype, torch.float32)
    mask = mask.bool()
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        empty = (lengths == 0).nonzero().flatten().tolist()
        raise ValueError(f"rollouts {empty} have no completion tokens; leave them out before the update")
    log_ratio = trainer_logprobs.to(dtype) - rollout_logprobs.detach().to(dtype)
    log_ratio = log_ratio.masked_fill(~mask, 0.0)  # [B, T]

    advantages = advantages.detach().to(dtype)
    ratio = torch.exp(log_ratio.sum(dim=1) / lengths)  # [B]
    surrogate = ratio * advantages
    surrogate_clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    # expm1(l) - l: written as exp(l) - l - 1 it would round to zero in float32 for gaps below 1e-4 nat
    kl = (torch.expm1(log_ratio) - log_ratio).sum(dim=1) / lengths  # [B]
    objective = torch.minimum(surrogate, surrogate_clipped)
    losses = regularizer * kl - (objective if weights is None else weights.detach().to(dtype) * objective)

    with torch.no_grad():
        clipped = (surrogate_clipped < surrogate).to(dtype)
        columns = torch.stack([losses, ratio, clipped, kl]).double().sum(dim=1)
        loss_sum, ratio_sum, clipped_sum, kl_sum, ratio_max = [*columns.tolist(), ratio.max().item()]
    sums = ObjectiveSums(
        loss=loss_sum,
        ratio=ratio_sum,
        ratio_max=ratio_max,
        clipped=clipped_sum,
        kl=kl_sum,
        weight=0.0 if weights is None else float(weights.double().sum()),
        num_rollouts=len(lengths),
        num_tokens=int(lengths.sum()),
    )
    return losses.sum(), sums


def importance_weights(rollout_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """w_o [B] of the module's docstring; all tensors [B, T], values outside ``mask`` are ignored."""
    mask = mask.bool()
    gap = (rollout_logprobs.detach().float() - engine_logprobs.float()).masked_fill(~mask, 0.0)
    return torch.exp(gap.sum(dim=1) / mask.sum(dim=1)).clamp(max=cap)


def _check(trainer: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor) -> None:
    if trainer.dim() != 2 or 0 in trainer.shape:
        raise ValueError(f"trainer_logprobs has shape {tuple(trainer.shape)}; expected [B, T] with B, T >= 1")
    expected = {"rollout_logprobs": (rollout, trainer.shape), "mask": (mask, trainer.shape)}
    for name, (tensor, shape) in (expected | {"advantages": (advantages, trainer.shape[:1])}).items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
