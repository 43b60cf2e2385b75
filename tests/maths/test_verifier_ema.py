"""The Verifier's average of merged weights: against its dense reference, its limits, and why it is kept in float32."""

import math

import pytest
import torch
from ema_factory import ALPHA, KINDS, ema, fresh_policy, random_policy, relative_error, walk

from trinity_vlm.ema import LowRank
from trinity_vlm.errors import CheckpointError


@pytest.mark.parametrize(
    ("lr", "drift", "rank", "bound"),
    [(1e-5, 0.5, 16, 9e-5), (1e-3, 0.5, 16, 1e-3), (1e-5, 0.0, 8, 4e-4), (1e-5, 0.0, 16, 2e-4), (1e-3, 0.0, 16, 2e-2)],
    ids=["paper", "tiny", "noise-r", "noise-2r", "noise-2r-fast"],
)
def test_factored_follows_the_dense_reference(lr, drift, rank, bound):
    """200 steps from r = 8: absolute bounds, and within 1.3 of the best that any rank-R adapter can do."""
    policy, generator = fresh_policy()
    factored, dense = ema("factored", {"w": policy}, rank=rank), ema("dense", {"w": policy})
    for _ in range(200):
        policy = walk(policy, generator, lr, drift)
        step, reference = factored.update({"w": policy}), dense.update({"w": policy})
    delta = dense.factors()["w"].product()
    singular = torch.linalg.svdvals(delta.double())
    error = relative_error(factored.factors()["w"].product(), delta)
    assert error < bound
    assert error < 1.3 * float(singular[rank:].norm() / singular.norm())
    assert step.delta_norm == pytest.approx(reference.delta_norm, rel=1e-3)
    assert 0 < step.mean_error == step.max_error < 1e-3
    assert (reference.max_error, reference.mean_error) == (0.0, 0.0)


def test_dense_is_the_average_of_merged_weights():
    """Against W0 + D averaged directly in float64, 50 large steps."""
    policy = random_policy()
    base = torch.randn(12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    dense, merged = ema("dense", {"w": policy}, alpha=0.9), base + policy.product().double()
    for seed in range(50):
        policy = random_policy(seed=seed + 1)
        dense.update({"w": policy})
        merged = 0.9 * merged + 0.1 * (base + policy.product().double())
    assert relative_error(base + dense.factors()["w"].product().double(), merged) < 1e-6


@pytest.mark.parametrize(("out", "into"), [(12, 20), (20, 12), (12, 12)])
def test_factored_is_exact_once_the_rank_covers_the_matrix(out, into):
    """R >= min(out, in): only float32 rounding is left, after any number of large full-rank steps."""
    policy = random_policy(out, into)
    factored, dense = ema("factored", {"w": policy}, rank=64, alpha=0.9), ema("dense", {"w": policy}, alpha=0.9)
    for seed in range(30):
        policy = random_policy(out, into, seed=seed + 1)
        step = factored.update({"w": policy})
        dense.update({"w": policy})
    assert factored.ranks() == {"w": 12}
    assert step.max_error == 0.0
    assert relative_error(factored.factors()["w"].product(), dense.factors()["w"].product()) < 1e-6


def test_factored_is_exact_while_its_rank_covers_the_sum_of_policies():
    """Two rank-3 policies after B = 0 span rank 6: R = 6 loses nothing, R = 5 does."""
    zero = LowRank(torch.zeros(12, 3), random_policy().right)
    policies = [random_policy(seed=1), random_policy(seed=2)]
    dense = ema("dense", {"w": zero}, alpha=0.5)
    exact, short = (ema("factored", {"w": zero}, rank=rank, alpha=0.5) for rank in (6, 5))
    for policy in policies:
        dense.update({"w": policy})
        exact_step, short_step = exact.update({"w": policy}), short.update({"w": policy})
    expected = dense.factors()["w"].product()
    assert relative_error(exact.factors()["w"].product(), expected) < 1e-6
    assert exact_step.max_error < 1e-12
    measured = relative_error(short.factors()["w"].product(), expected)
    assert measured > 1e-3
    assert short_step.max_error == pytest.approx(measured, rel=1e-4), "the logged error is the true one"


def test_average_of_factors_is_another_model():
    """B A from 1*1 to 3*(-1), alpha = 1/2: merged average -1, product of averaged factors 2*0 = 0."""
    before, after = (LowRank(torch.tensor([[b]]), torch.tensor([[a]])) for b, a in ((1.0, 1.0), (3.0, -1.0)))
    for kind in ("factored", "dense"):
        verifier = ema(kind, {"w": before}, rank=1, alpha=0.5)
        verifier.update({"w": after})
        assert verifier.factors()["w"].product().item() == pytest.approx(-1.0, abs=1e-6)
    averaged = LowRank(0.5 * (before.left + after.left), 0.5 * (before.right + after.right))
    assert averaged.product().item() == 0.0


@pytest.mark.parametrize("kind", ["factored", "dense"])
def test_alpha_one_never_moves_and_alpha_zero_is_the_policy(kind):
    initial, policy = random_policy(seed=1), random_policy(seed=2)
    still, follow = ema(kind, {"w": initial}, alpha=1.0), ema(kind, {"w": initial}, alpha=0.0)
    for _ in range(5):
        still.update({"w": policy})
        follow.update({"w": policy})
    assert relative_error(still.factors()["w"].product(), initial.product()) < 1e-6
    assert relative_error(follow.factors()["w"].product(), policy.product()) < 1e-6


def test_one_step_moves_by_one_minus_alpha():
    """From D = 0: D = 0.001 s B A after one step, and its norm is logged."""
    policy, generator = fresh_policy()
    moved = walk(policy, generator, 1e-2)
    for kind in ("factored", "dense"):
        verifier = ema(kind, {"w": policy})
        step = verifier.update({"w": moved})
        assert relative_error(verifier.factors()["w"].product(), 0.001 * moved.product()) < 1e-6
        assert step.delta_norm == pytest.approx(0.001 * moved.norm(), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_starts_at_the_policy(kind):
    """phi_0 = theta_0: D_0 = 0 for a fresh adapter, the adapter's own delta otherwise."""
    fresh, warm = fresh_policy()[0], random_policy()
    verifier = ema(kind, {"fresh": fresh, "warm": warm})
    assert torch.equal(verifier.factors()["fresh"].product(), torch.zeros(96, 160))
    assert relative_error(verifier.factors()["warm"].product(), warm.product()) < 1e-6


def test_none_is_the_current_policy_and_frozen_the_initial_one():
    initial, policy = random_policy(seed=1), random_policy(seed=2)
    current, frozen = ema("none", {"w": initial}), ema("frozen", {"w": initial})
    assert current.update({"w": policy}).delta_norm == pytest.approx(float(policy.product().norm()), rel=1e-6)
    assert frozen.update({"w": policy}).delta_norm == pytest.approx(float(initial.product().norm()), rel=1e-6)
    assert torch.equal(current.factors()["w"].left, policy.left)
    assert torch.equal(frozen.factors()["w"].right, initial.right)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_have_the_announced_rank_and_float32(kind):
    """Also for a bf16 policy, and constant over updates: the engine's adapter is allocated once."""
    policy = {"wide": random_policy(6, 20, 3), "tall": random_policy(40, 30, 3)}
    policy = {name: LowRank(delta.left.bfloat16(), delta.right.bfloat16()) for name, delta in policy.items()}
    verifier = ema(kind, policy, rank=8)
    announced = verifier.ranks()
    verifier.update(policy)
    assert announced == verifier.ranks()
    expected = {"factored": (6, 8), "dense": (6, 30), "none": (3, 3), "frozen": (3, 3)}[kind]
    assert (announced["wide"], announced["tall"]) == expected
    for name, delta in verifier.factors().items():
        assert delta.rank == delta.left.shape[1] == announced[name]
        assert delta.left.dtype == delta.right.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trip_is_bit_exact_and_resumes_bit_exactly(kind):
    """Save after 3 steps, restore into a fresh EMA, go on 3 steps: same bits as never having stopped."""
    initial = {"a.b": random_policy(seed=1), "c": random_policy(20, 8, seed=2)}
    straight, resumed = ema(kind, initial, rank=4), ema(kind, initial, rank=4)
    for seed in range(3):
        straight.update({name: random_policy(*delta.shape, seed=seed) for name, delta in initial.items()})
    saved = {name: tensor.clone() for name, tensor in straight.state_dict().items()}
    resumed.load_state_dict(saved)
    for tensor in saved.values():
        tensor.zero_()  # what was loaded belongs to the EMA
    for seed in range(3, 6):
        policy = {name: random_policy(*delta.shape, seed=seed) for name, delta in initial.items()}
        assert straight.update(policy) == resumed.update(policy)
    assert straight.state_dict().keys() == resumed.state_dict().keys()
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
        assert tensor.is_contiguous(), "safetensors refuses other layouts"


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_state_is_refused_and_changes_nothing(kind):
    verifier = ema(kind, {"w": random_policy()}, rank=4)
    before = verifier.state_dict()
    some = next(iter(before))
    missing = {name: tensor for name, tensor in before.items() if name != some}
    for state in (
        missing,
        before | {"v.left": torch.zeros(1)},
        before | {some: before[some][:, 1:]},
        before | {some: before[some].half()},
    ):
        with pytest.raises(CheckpointError, match="Verifier state"):
            verifier.load_state_dict(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in verifier.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_update_refuses_other_target_matrices(kind):
    verifier = ema(kind, {"w": random_policy()})
    with pytest.raises(ValueError, match=r"differ: \['v'\]"):
        verifier.update({"w": random_policy(), "v": random_policy()})


@pytest.mark.parametrize("kind", KINDS)
def test_later_in_place_changes_of_the_policy_do_not_reach_the_verifier(kind):
    """The optimizer steps the very tensors in place; past factors and states stay what they were."""
    policy = random_policy()
    verifier = ema(kind, {"w": policy}, alpha=0.5)
    verifier.update({"w": policy})
    factors, state = verifier.factors()["w"], dict(verifier.state_dict())
    kept = factors.product(), {name: tensor.clone() for name, tensor in state.items()}
    policy.left.add_(1.0)
    policy.right.mul_(2.0)
    assert torch.equal(verifier.factors()["w"].product(), kept[0])
    verifier.update({"w": random_policy(seed=5)})
    assert torch.equal(factors.product(), kept[0])
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in state.items())


def test_policies_that_require_grad_leave_no_graph():
    policy = LowRank(torch.randn(5, 2, requires_grad=True), torch.randn(2, 7, requires_grad=True))
    for kind in KINDS:
        verifier = ema(kind, {"w": policy})
        verifier.update({"w": policy})
        assert not any(tensor.requires_grad for tensor in verifier.state_dict().values())


def test_no_target_matrices_is_a_step_of_zeros():
    for kind in KINDS:
        step = ema(kind, {}).update({})
        assert (step.max_error, step.mean_error, step.delta_norm) == (0.0, 0.0, 0.0)


def test_zero_delta_has_no_error():
    """Updates before the adapter has moved: 0 / 0 is logged as 0, never NaN."""
    policy, _ = fresh_policy()
    step = ema("factored", {"w": policy}).update({"w": policy})
    assert (step.max_error, step.mean_error, step.delta_norm) == (0.0, 0.0, 0.0)


def test_step_reports_worst_and_mean_matrix():
    """One matrix loses its fourth direction, the other fits: mean is half of max."""
    zero = LowRank(torch.zeros(4, 4), torch.eye(4))
    full = LowRank(torch.diag(torch.tensor([2.0, 2.0, 2.0, 2.0])), torch.eye(4))
    low = LowRank(torch.diag(torch.tensor([1.0, 0.0, 0.0, 0.0])), torch.eye(4))
    step = ema("factored", {"a": zero, "b": zero}, rank=3, alpha=0.0).update({"a": full, "b": low})
    assert step.max_error == pytest.approx(0.5, abs=1e-12)
    assert step.mean_error == pytest.approx(0.25, abs=1e-12)
    assert step.delta_norm == pytest.approx(math.sqrt(17), abs=1e-12)
    assert step.metrics() == {
        "ema/max_error": step.max_error,
        "ema/mean_error": step.mean_error,
        "ema/delta_norm": step.delta_norm,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_stays_there_and_agrees_with_the_cpu():
    """Same updates on both; factors and state never leave the policy's device."""
    initial = {"a": random_policy(seed=1), "b": random_policy(40, 30, 5, seed=2)}
    cpu = ema("factored", initial, rank=6, alpha=0.5)
    gpu = ema("factored", {n: LowRank(d.left.cuda(), d.right.cuda()) for n, d in initial.items()}, rank=6, alpha=0.5)
    for seed in range(3):
        policy = {name: random_policy(*delta.shape, seed=seed) for name, delta in initial.items()}
        expected = cpu.update(policy)
        found = gpu.update({name: LowRank(d.left.cuda(), d.right.cuda()) for name, d in policy.items()})
        assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-6)
    assert all(tensor.is_cuda for tensor in gpu.state_dict().values())
    for name, delta in gpu.factors().items():
        assert relative_error(delta.product().cpu(), cpu.factors()[name].product()) < 1e-6


def test_bf16_copies_of_the_average_do_not_move():
    """Why D is kept apart in float32: a bf16 EMA of W0 + sBA hardly changes, and bf16(W0 + D) loses most of D.

    512 x 512, W0 ~ N(0, 0.02), r = 16, 100 steps in which every entry of B drifts by lr = 1e-5.
    """
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(512, 512, generator=generator)
    policy, _ = fresh_policy(512, 512, 16)
    drift = torch.sign(torch.randn(512, 16, generator=generator))
    start = base.bfloat16()
    copy, verifier = start.clone(), ema("factored", {"w": policy}, rank=32)
    for step in range(1, 101):
        moved = LowRank(2 * step * 1e-5 * drift, policy.right)
        verifier.update({"w": moved})
        copy = (ALPHA * copy.float() + (1 - ALPHA) * (base + moved.product())).bfloat16()
    delta = verifier.factors()["w"].product()
    assert float(delta.norm()) > 0
    assert (copy != start).float().mean() < 0.01
    rounded = (start.float() + delta).bfloat16().float() - start.float()
    assert relative_error(rounded, delta) > 0.8
    exact = (start.double() + delta.double()) - start.double()
    assert relative_error(exact, delta) < 1e-9
