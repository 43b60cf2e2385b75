"""The Verifier's weights: an exponential moving average of the *merged* policy weights (Section 2, A.2).

    phi <- alpha phi + (1 - alpha) theta after each outer step,  phi_0 = theta_0

Only LoRA targets move, so per target matrix phi = W0 + D and theta = W0 + s B A with

    D <- alpha D + (1 - alpha) s B A,   D_0 = s B_0 A_0  (0 for a fresh adapter, whose B is 0)

This is not an average of the factors: for scalars B A going from 1*1 to 3*(-1), alpha = 1/2 gives D = -1, averaged
factors give 2*0 = 0. D is about 1e-3 of W0, below bf16's rounding step, so a bf16 copy of phi never moves: D is kept
apart, in float32.

``factored`` (default) keeps D as a rank-R adapter, so the Verifier is a second adapter over the same base model:

    alpha D + (1 - alpha) s B A = [alpha U | (1 - alpha) s B] [V ; A]    rank <= R + r
    QR of both sides, SVD of the small core, keep the R largest singular values

``dense`` keeps D itself (reference, small models); ``none`` verifies with the current policy, ``frozen`` with theta_0.

Degenerate cases: alpha = 1 never moves, alpha = 0 is ``none``; while R covers the rank of D (always once
R >= min(out, in)) nothing is truncated; D = 0 has a relative error of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trinity_vlm.errors import CheckpointError

if TYPE_CHECKING:
    from trinity_vlm.config import EmaConfig


SIDES = ("left", "right")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A weight delta ``left [out, R] @ right [R, in]``; for a LoRA layer ``left`` is s B and ``right`` is A."""

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        return self.right.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight matrix."""
        return self.left.shape[0], self.right.shape[1]

    def product(self) -> Tensor:
        """The delta itself, [out, in], float32."""
        return self.left.float() @ self.right.float()

    def norm(self) -> float:
        """Frobenius norm of the delta, from the Gram matrices of its factors."""
        left, right = self.left.detach().double(), self.right.detach().double()
        return float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())


@dataclass(frozen=True, slots=True)
class EmaStep:
    """What one update did, over all target matrices.

    max_error, mean_error: |D truncated - D| / |D| of this step alone (Frobenius); 0 for kinds that don't truncate
    delta_norm: Frobenius norm of all D together
    """

    max_error: float
    mean_error: float
    delta_norm: float

    def metrics(self) -> dict[str, float]:
        """The fields by metric name. Every worker holds the same adapter, so they need no reduction."""
        return {f"ema/{field.name}": getattr(self, field.name) for field in fields(self)}


class VerifierEma(Protocol):
    """The Verifier's delta per target matrix. Every kind owns its tensors: the policy may change in place later."""

    def update(self, policy: Mapping[str, LowRank]) -> EmaStep:
        """Advance by one outer step. Raises ValueError when the target matrices are not the initial ones."""
        ...

    def factors(self) -> Mapping[str, LowRank]:
        """What the Verifier's adapter must be, per target matrix, float32. Never modified by later updates."""
        ...

    def ranks(self) -> Mapping[str, int]:
        """Rank of ``factors()`` per target matrix, constant over a run."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Flat float32 tensors from which ``load_state_dict`` restores the very same bits."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore. Raises CheckpointError when names, shapes or dtypes are not this EMA's."""
        ...


def make_ema(config: EmaConfig, initial: Mapping[str, LowRank], rank: int) -> VerifierEma:
    """The EMA of ``config.kind``, starting at the given policy; ``rank`` is the factored kind's R (Config.ema_rank)."""
    match config.kind:
        case "factored":
            return FactoredEma(initial, config.alpha, rank)
        case "dense":
            return DenseEma(initial, config.alpha)
        case "none":
            return CurrentPolicy(initial)
        case "frozen":
            return FrozenPolicy(initial)


class _LowRankState:
    """What the kinds share that hold one low-rank delta per target matrix, float32 and their own."""

    def __init__(self, deltas: Mapping[str, LowRank]) -> None:
        self._deltas = {name: _float32(delta) for name, delta in deltas.items()}

    def factors(self) -> Mapping[str, LowRank]:
        return dict(self._deltas)

    def ranks(self) -> Mapping[str, int]:
        return {name: delta.rank for name, delta in self._deltas.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{name}.{side}": getattr(delta, side) for name, delta in self._deltas.items() for side in SIDES}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _check_state(state, self.state_dict())
        for name, delta in self._deltas.items():
            left, right = (_copy_like(state[f"{name}.{side}"], getattr(delta, side)) for side in SIDES)
            self._deltas[name] = LowRank(left, right)


class FactoredEma(_LowRankState):
    """D as a float32 adapter of rank min(R, out, in), re-truncated every step."""

    def __init__(self, initial: Mapping[str, LowRank], alpha: float, rank: int) -> None:
        super().__init__({name: truncate(delta, min(rank, *delta.shape))[0] for name, delta in initial.items()})
        self._alpha = alpha

    def update(self, policy: Mapping[str, LowRank]) -> EmaStep:
        _check_targets(policy, self._deltas)
        errors: list[float] = []
        norms: list[float] = []
        for name, delta in self._deltas.items():
            mixed = _mix(delta, policy[name], self._alpha)
            self._deltas[name], lost, norm = truncate(mixed, delta.rank)
            errors.append(lost / norm if norm else 0.0)
            norms.append(norm)
        return EmaStep(max(errors, default=0.0), math.fsum(errors) / max(len(errors), 1), math.hypot(*norms))


class DenseEma:
    """D itself, float32 [out, in] per matrix. Its adapter is exact: D times an identity, of rank min(out, in)."""

    def __init__(self, initial: Mapping[str, LowRank], alpha: float) -> None:
        self._alpha = alpha
        self._deltas = {name: delta.product().detach() for name, delta in initial.items()}

    def update(self, policy: Mapping[str, LowRank]) -> EmaStep:
        _check_targets(policy, self._deltas)
        for name, delta in self._deltas.items():
            mixed = self._alpha * delta.double() + (1 - self._alpha) * policy[name].product().detach().double()
            self._deltas[name] = mixed.float()
        return _untruncated_step(self._deltas)

    def factors(self) -> Mapping[str, LowRank]:
        return {name: _with_identity(delta) for name, delta in self._deltas.items()}

    def ranks(self) -> Mapping[str, int]:
        return {name: min(delta.shape) for name, delta in self._deltas.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{name}.delta": delta for name, delta in self._deltas.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _check_state(state, self.state_dict())
        self._deltas = {name: _copy_like(state[f"{name}.delta"], delta) for name, delta in self._deltas.items()}


class CurrentPolicy(_LowRankState):
    """Ablation ``none``: the Verifier is the policy of the last update."""

    def update(self, policy: Mapping[str, LowRank]) -> EmaStep:
        _check_targets(policy, self._deltas)
        self._deltas = {name: _float32(policy[name]) for name in self._deltas}
        return _untruncated_step(self._deltas)


class FrozenPolicy(_LowRankState):
    """Ablation ``frozen``: the Verifier stays at theta_0."""

    def update(self, policy: Mapping[str, LowRank]) -> EmaStep:
        _check_targets(policy, self._deltas)
        return _untruncated_step(self._deltas)


def truncate(delta: LowRank, rank: int) -> tuple[LowRank, float, float]:
    """Best rank-``rank`` approximation: (float32 factors, Frobenius norm of what was cut, Frobenius norm before).

    Works in float64 and never forms the product. Singular values descend along the rank, ``right`` has orthonormal
    rows (zero rows where ``delta`` has fewer than ``rank``), and each row's entry of largest magnitude is positive,
    which fixes the signs.
    """
    left_basis, left_core = torch.linalg.qr(delta.left.detach().double())
    right_basis, right_core = torch.linalg.qr(delta.right.detach().double().T)
    u, singular, vh = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
    norm, lost = float(singular.norm()), float(singular[rank:].norm())
    left = left_basis @ (u[:, :rank] * singular[:rank])
    right = vh[:rank] @ right_basis.T
    missing = rank - len(singular[:rank])
    left = torch.nn.functional.pad(left, (0, missing))
    right = torch.nn.functional.pad(right, (0, 0, 0, missing))
    peak = right.gather(1, right.abs().argmax(dim=1, keepdim=True))
    sign = torch.where(peak < 0, -1.0, 1.0).to(right.dtype)  # [rank, 1]
    return LowRank((left * sign.T).float().contiguous(), (right * sign).float().contiguous()), lost, norm


def _mix(verifier: LowRank, policy: LowRank, alpha: float) -> LowRank:
    """alpha D + (1 - alpha) s B A as one product of rank R + r, float64."""
    left = torch.cat([alpha * verifier.left.double(), (1 - alpha) * policy.left.detach().double()], dim=1)
    return LowRank(left, torch.cat([verifier.right.double(), policy.right.detach().double()], dim=0))


def _with_identity(delta: Tensor) -> LowRank:
    rows, columns = delta.shape
    identity = torch.eye(min(rows, columns), device=delta.device)
    return LowRank(delta, identity) if columns <= rows else LowRank(identity, delta)


def _untruncated_step(deltas: Mapping[str, LowRank] | Mapping[str, Tensor]) -> EmaStep:
    norms = [float(d.double().norm()) if isinstance(d, Tensor) else d.norm() for d in deltas.values()]
    return EmaStep(max_error=0.0, mean_error=0.0, delta_norm=math.hypot(*norms))


def _float32(delta: LowRank) -> LowRank:
    return LowRank(*(tensor.detach().to(torch.float32, copy=True) for tensor in (delta.left, delta.right)))


def _copy_like(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().to(like.device, copy=True)


def _check_targets(policy: Mapping[str, LowRank], deltas: Mapping[str, LowRank] | Mapping[str, Tensor]) -> None:
    if policy.keys() != deltas.keys():
        difference = sorted(policy.keys() ^ deltas.keys())
        raise ValueError(f"target matrices of policy and Verifier differ: {difference[:5]}")


def _check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if state.keys() != expected.keys():
        difference = sorted(state.keys() ^ expected.keys())
        raise CheckpointError(
            f"Verifier state: {len(difference)} tensors missing or unknown, for example {difference[:3]}; "
            "was it written with another ema.kind or other lora.targets?"
        )
    for name, tensor in expected.items():
        found = state[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise CheckpointError(
                f"Verifier state {name}: {found.dtype} {tuple(found.shape)} instead of {tensor.dtype} "
                f"{tuple(tensor.shape)}; was it written with another lora.rank or ema.rank?"
            )
