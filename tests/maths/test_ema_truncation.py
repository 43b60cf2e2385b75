"""The rank-R truncation under the Verifier's average: canonical, the best of its rank, alone as among others."""

import math

import pytest
import torch
from ema_factory import ALPHA, ema, fresh_policy, random_policy, relative_error, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_vlm import ema as ema_module
from trinity_vlm.ema import LowRank, truncate


def test_truncation_is_canonical():
    """Descending, orthonormal right rows, positive peaks: other factors of the same product end in the same place."""
    delta = random_policy(10, 14, 4)
    rotated = LowRank(-2 * delta.left.flip(1), -0.5 * delta.right.flip(0))
    cut, other = truncate([delta, rotated], 3)
    one, two = cut.delta, other.delta
    assert torch.allclose(one.left, two.left, atol=1e-5)
    assert torch.allclose(one.right, two.right, atol=1e-5)
    sizes = one.left.norm(dim=0)
    assert torch.all(sizes[:-1] >= sizes[1:])
    assert torch.allclose(one.right @ one.right.T, torch.eye(3), atol=1e-6)
    assert torch.all(one.right.gather(1, one.right.abs().argmax(dim=1, keepdim=True)) > 0)
    singular = torch.linalg.svdvals(delta.product().double())
    assert cut.lost == pytest.approx(float(singular[3]), rel=1e-5)
    assert cut.norm == pytest.approx(float(singular.norm()), rel=1e-5)


MATRICES = st.lists(
    st.tuples(
        st.sampled_from([(12, 20), (20, 12), (5, 5), (40, 9)]),  # out, in
        st.integers(1, 4),  # rank of the policy
        st.sampled_from([1.0, 1e-6, 1e6]),  # size of B
        st.sampled_from(["random", "zero left", "zero right", "one column", "repeated columns"]),
    ),
    min_size=1,
    max_size=8,
)


def special_policy(shape, rank, scale, kind, seed):
    policy = random_policy(*shape, rank, seed, scale)
    match kind:
        case "zero left":
            policy.left.zero_()
        case "zero right":
            policy.right.zero_()
        case "one column":
            policy.left[:, 1:] = 0
        case "repeated columns":
            policy.left[:] = policy.left[:, :1]
    return policy


@settings(max_examples=25, deadline=None)
@given(matrices=MATRICES, rank=st.integers(1, 12), alpha=st.sampled_from([0.0, 0.5, ALPHA, 1.0]))
def test_matrices_together_are_matrices_one_by_one(matrices, rank, alpha):
    """Any mix of shapes, ranks, sizes and dependent or vanishing factors: 3 updates of all against 3 of each alone."""
    policies = [
        {str(i): special_policy(*matrix, seed=10 * step + i) for i, matrix in enumerate(matrices)} for step in range(4)
    ]
    together = ema("factored", policies[0], rank, alpha)
    alone = {name: ema("factored", {name: policies[0][name]}, rank, alpha) for name in policies[0]}
    for policy in policies[1:]:
        step = together.update(policy)
        steps = [verifier.update({name: policy[name]}) for name, verifier in alone.items()]
        assert step.max_error == pytest.approx(max(one.max_error for one in steps), rel=1e-6, abs=1e-9)
        assert step.mean_error == pytest.approx(sum(one.mean_error for one in steps) / len(steps), rel=1e-6, abs=1e-9)
        assert step.delta_norm == pytest.approx(math.hypot(*(one.delta_norm for one in steps)), rel=1e-6)
    assert list(together.factors()) == list(policies[0])
    for name, delta in together.factors().items():
        single = alone[name].factors()[name].product()
        assert (delta.product() - single).norm() <= 1e-6 * single.norm()


@settings(max_examples=40, deadline=None)
@given(matrix=MATRICES.map(lambda matrices: matrices[0]), rank=st.integers(1, 20), seed=st.integers(0, 99))
def test_truncation_is_the_best_of_its_rank(matrix, rank, seed):
    """Against the SVD of the product: nothing of lower error has this rank, and lost and norm are the true ones."""
    delta = special_policy(*matrix, seed)
    cut = truncate([delta], rank)[0]
    product = delta.left.double() @ delta.right.double()
    singular = torch.linalg.svdvals(product)
    norm, best = float(singular.norm()), float(singular[rank:].norm())
    found = float((product - cut.delta.left.double() @ cut.delta.right.double()).norm())
    assert found <= best + 3e-7 * norm
    assert cut.lost == pytest.approx(best, rel=1e-6, abs=1e-9 * norm)
    assert cut.norm == pytest.approx(norm, rel=1e-9)
    assert cut.delta.rank == rank
    gram = cut.delta.right @ cut.delta.right.T
    kept = gram.diagonal() > 0.5
    assert torch.allclose(gram, torch.diag(kept.float()), atol=1e-6), "orthonormal rows, then rows of 0"
    assert int(kept.sum()) == min(rank, int((singular > 1e-9 * singular[0]).sum()))
    assert not cut.delta.left[:, ~kept].any()


def test_a_delta_of_lower_rank_than_both_factors():
    """u0 (w - v) + u1 (2w - v) + (u0 + u1) v = (u0 + 2 u1) w: each side has rank 2, the delta has rank 1."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(2, size, dtype=torch.float64, generator=generator) for size in (30, 50))
    left = torch.stack([u[0], u[1], u[0] + u[1]], dim=1)
    delta = LowRank(left, torch.stack([v[1] - v[0], 2 * v[1] - v[0], v[0]]))
    one, two = truncate([delta], 1)[0], truncate([delta], 2)[0]
    assert one.lost == 0.0
    assert relative_error(two.delta.product(), torch.outer(u[0] + 2 * u[1], v[1])) < 1e-6
    assert torch.equal(two.delta.right[1], torch.zeros(50))


def test_memory_bound_of_a_batch_changes_no_result(monkeypatch):
    """Two matrices of a shape at a time, or one larger than the bound: as all at once."""
    initial = {str(i): random_policy(seed=i) for i in range(5)} | {"tall": random_policy(50, 20)}
    policy = {name: random_policy(*delta.shape, seed=9) for name, delta in initial.items()}
    whole, parts = ema("factored", initial, rank=5, alpha=0.5), ema("factored", initial, rank=5, alpha=0.5)
    expected = whole.update(policy)
    monkeypatch.setattr(ema_module, "_BATCH_ENTRIES", 2 * (12 + 20) * (5 + 3))
    sizes = [len(names) for names in ema_module._batches(parts.factors(), policy)]
    assert sizes == [2, 2, 1, 1]
    found = parts.update(policy)
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-9)
    for name, delta in whole.factors().items():
        assert relative_error(parts.factors()[name].product(), delta.product()) < 1e-6


def test_slow_policy_at_full_size_loses_as_little_as_orthogonal_bases():
    """Nearly dependent columns, the usual case: r = 16, 40 steps of 1e-5, against QR of both sides in float64.

    Gram matrices square the condition number, so this is where they could fall behind.
    """
    policy, generator = fresh_policy(300, 500, 16)
    verifier = ema("factored", {"w": policy}, rank=32)
    reference = LowRank(torch.zeros(300, 32), torch.zeros(32, 500))
    for _ in range(40):
        policy = walk(policy, generator, 1e-5, drift=0.5)
        step = verifier.update({"w": policy})
        left = torch.cat([ALPHA * reference.left.double(), (1 - ALPHA) * policy.left.double()], dim=1)
        right = torch.cat([reference.right.double(), policy.right.double()])
        (q, r), (p, s) = torch.linalg.qr(left), torch.linalg.qr(right.T)
        u, singular, vh = torch.linalg.svd(r @ s.T)
        reference = LowRank((q @ u[:, :32] * singular[:32]).float(), (vh[:32] @ p.T).float())
        assert step.max_error == pytest.approx(float(singular[32:].norm() / singular.norm()), rel=1e-3, abs=1e-9)
    assert relative_error(verifier.factors()["w"].product(), reference.product()) < 1e-6


def test_threads_are_as_before_also_after_a_failure():
    """Small decompositions run on one thread; what follows has the caller's threads again."""
    before, policy = torch.get_num_threads(), random_policy()
    try:
        torch.set_num_threads(2)
        verifier = ema("factored", {"w": policy})
        verifier.update({"w": policy})
        assert torch.get_num_threads() == 2
        policy.left.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="converge"):
            verifier.update({"w": policy})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
