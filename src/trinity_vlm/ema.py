"""The Verifier's weights: an exponential moving average of the *merged* policy weights (Section 2, A.2).

    phi <- alpha phi + (1 - alpha) theta after each outer step,  phi_0 = theta_0

Only LoRA targets move, so per target matrix phi = W0 + D and theta = W0 + s B A with

    D <- alpha D + (1 - alpha) s B A,   D_0 = s B_0 A_0  (0 for a fresh adapter, whose B is 0)

This is not an average of the factors: for scalars B A going from 1*1 to 3*(-1), alpha = 1/2 gives D = -1, averaged
factors give 2*0 = 0. D is about 1e-3 of W0, below bf16's rounding step, so a bf16 copy of phi never moves: D is kept
apart, in float32.

``factored`` (default) keeps D as a rank-R adapter, so the Verifier is a second adapter over the same base model:

    alpha D + (1 - alpha) s B A = [alpha U | (1 - alpha) s B] [V ; A]    rank <= R + r
    orthonormal bases of both sides, SVD of the small core between them, keep the R largest singular values

Matrices of equal shape go through this together, wherever their factors live (see ``truncate``).

``dense`` keeps D itself (reference, small models); ``none`` verifies with the current policy, ``frozen`` with theta_0.

Degenerate cases: alpha = 1 never moves, alpha = 0 is ``none``; while R covers the rank of D (always once
R >= min(out, in)) nothing is truncated; D = 0 has a relative error of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trinity_vlm.errors import CheckpointError

if TYPE_CHECKING:
    from trinity_vlm.config import EmaConfig


SIDES = ("left", "right")
_BATCH_ENTRIES = 1 << 25  # of factors handled at once: 256 MiB in float64
_RESOLUTION = 1e-10  # a singular value below this part of the largest is zero: float32 factors carry 6e-8


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
        return math.sqrt(float(_squared_norm(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Truncation:
    """A delta cut to a rank. lost, norm: Frobenius norms of what was cut and of the delta before."""

    delta: LowRank
    lost: float
    norm: float

    @property
    def error(self) -> float:
        """Relative; 0 for a delta of 0."""
        return self.lost / self.norm if self.norm else 0.0


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
        deltas = dict(initial)
        for names in _batches(initial):
            batch = [initial[name] for name in names]
            deltas |= {n: cut.delta for n, cut in zip(names, truncate(batch, min(rank, *batch[0].shape)), strict=True)}
        super().__init__(deltas)
        self._alpha = alpha

    def update(self, policy: Mapping[str, LowRank]) -> EmaStep:
        _check_targets(policy, self._deltas)
        cuts: list[Truncation] = []
        for names in _batches(self._deltas, policy):
            mixed = [_mix(self._deltas[name], policy[name], self._alpha) for name in names]
            batch = truncate(mixed, self._deltas[names[0]].rank)
            self._deltas |= {name: cut.delta for name, cut in zip(names, batch, strict=True)}
            cuts += batch
        errors = [cut.error for cut in cuts]
        return EmaStep(
            max_error=max(errors, default=0.0),
            mean_error=math.fsum(errors) / max(len(errors), 1),
            delta_norm=math.hypot(*(cut.norm for cut in cuts)),
        )


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


@torch.no_grad()
def truncate(deltas: Sequence[LowRank], rank: int) -> list[Truncation]:
    """Best rank-``rank`` approximation of each delta; all have one shape [out, in], one rank k and one device.

    Works in float64 and never forms a product. With L^T L = F F^T and R R^T = G G^T (both k x k)

        L R = (L F^-T) (F^T G) (G^-1 R)    whose outer parts are orthonormal

    so the SVD of the small core F^T G is that of the delta. Large matrices meet nothing but batched products on their
    own device; the k x k ones are decomposed on the CPU, where LAPACK is quick at this size, with one copy each way.
    However rough F and G, their inverses cancel in L R; so this is as good as QR of both sides, which is far slower.

    Factors are float32. Singular values descend along the rank, ``right`` has orthonormal rows (zero rows where the
    delta has fewer than ``rank``), and each row's entry of largest magnitude is positive, which fixes the signs.
    """
    left = torch.stack([delta.left.double() for delta in deltas])
    right = torch.stack([delta.right.double() for delta in deltas])
    grams = torch.stack([left.mT @ left, right @ right.mT]).cpu()
    with _one_thread():
        left_map, right_map, singular = _best_maps(grams, rank)
    left, right = left @ left_map.to(left.device), right_map.to(right.device) @ right
    peak = right.gather(2, right.abs().argmax(dim=2, keepdim=True))
    sign = torch.where(peak < 0, -1.0, 1.0).to(right.dtype)  # [n, rank, 1]
    left, right = (left * sign.mT).float(), (right * sign).float()
    lost, norm = singular[:, rank:].norm(dim=1).tolist(), singular.norm(dim=1).tolist()
    return [
        Truncation(LowRank(*sides), *sizes)
        for *sides, sizes in zip(left, right, zip(lost, norm, strict=True), strict=True)
    ]


def _best_maps(grams: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What to multiply L with [n, k, rank] and R with [n, rank, k], and the singular values [n, k].

    grams: L^T L and R R^T, [2, n, k, k]
    """
    (left_root, left_inverse), (right_root, right_inverse) = (_gram_root(gram) for gram in grams)
    u, singular, vh = torch.linalg.svd(left_root.mT @ right_root)
    singular = torch.where(singular > _RESOLUTION * singular[:, :1], singular, 0.0)
    kept = singular[:, :rank]
    left_map = left_inverse @ (u[..., :rank] * kept[:, None, :])
    right_map = (vh[:, :rank] * (kept > 0)[..., None]) @ right_inverse.mT
    missing = rank - kept.shape[1]
    pad = torch.nn.functional.pad
    return pad(left_map, (0, missing)), pad(right_map, (0, 0, 0, missing)), singular


def _gram_root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """F and F^-T, [n, k, k], of gram = F F^T; for gram = X^T X the columns of X F^-T are orthonormal, or 0.

    Columns of X are first brought to length 1, whatever their scale. Directions in which they then depend on each
    other up to rounding (shorter than 1.5e-7 at k = 96, about what float32 columns can tell) are left out.
    """
    norm = gram.diagonal(dim1=-2, dim2=-1).sqrt()[..., None]
    scale = torch.where(norm > 0, norm, 1.0)
    values, vectors = torch.linalg.eigh(gram / (scale * scale.mT))
    values = values[:, None, :]
    distinct = values > gram.shape[-1] * torch.finfo(gram.dtype).eps
    lengths = torch.where(distinct, values, 1.0).sqrt()
    vectors = vectors * distinct
    return norm * vectors * lengths, vectors / (scale * lengths)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Decompositions of small matrices gain nothing from more, and slow down ten- to hundredfold on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _batches(*sides: Mapping[str, LowRank]) -> Iterator[list[str]]:
    """Names of matrices that are alike in every mapping, at most ``_BATCH_ENTRIES`` factor entries at a time."""
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name in sides[0]:
        groups.setdefault(tuple((*side[name].shape, side[name].rank) for side in sides), []).append(name)
    for alike, names in groups.items():
        size = max(1, _BATCH_ENTRIES // sum((out + into) * rank for out, into, rank in alike))
        yield from (names[start : start + size] for start in range(0, len(names), size))


def _mix(verifier: LowRank, policy: LowRank, alpha: float) -> LowRank:
    """alpha D + (1 - alpha) s B A as one product of rank R + r, float64."""
    left = torch.cat([alpha * verifier.left.double(), (1 - alpha) * policy.left.detach().double()], dim=1)
    return LowRank(left, torch.cat([verifier.right.double(), policy.right.detach().double()], dim=0))


def _with_identity(delta: Tensor) -> LowRank:
    rows, columns = delta.shape
    identity = torch.eye(min(rows, columns), device=delta.device)
    return LowRank(delta, identity) if columns <= rows else LowRank(identity, delta)


def _untruncated_step(deltas: Mapping[str, LowRank] | Mapping[str, Tensor]) -> EmaStep:
    squares = [_squared_norm(delta) for delta in deltas.values()]
    total = float(torch.stack(squares).sum()) if squares else 0.0
    return EmaStep(max_error=0.0, mean_error=0.0, delta_norm=math.sqrt(total))


def _squared_norm(delta: LowRank | Tensor) -> Tensor:
    """Of a delta, or of one as its factors by their Gram matrices; float64, on the device."""
    if isinstance(delta, Tensor):
        return delta.double().square().sum()
    left, right = delta.left.detach().double(), delta.right.detach().double()
    return ((left.T @ left) * (right @ right.T)).sum().clamp(min=0)


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
