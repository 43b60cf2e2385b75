"""The update on a real tiny VLM: what must not change it, and what must."""

import dataclasses
import itertools
import math
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from loop_factory import UPDATE, largest_difference, relative_difference, rollout, some_rollouts, tiny_backbone, weights

from trinity_vlm import machine
from trinity_vlm import trainer as trainer_module
from trinity_vlm.errors import TrainingError
from trinity_vlm.trainer import Trainer, learning_rate, trained_role
from trinity_vlm.types import POLICY, Role
from trinity_vlm.workers import Workers


def changed(config, **values):
    return config.model_copy(update=values)


def updated(config=UPDATE, steps=1, count=9):
    """Weights and last metrics after ``steps`` updates on the same rollouts."""
    backbone = tiny_backbone()
    trainer = Trainer(backbone, config, total_steps=10)
    for step in range(steps):
        metrics = trainer.update(some_rollouts(backbone, count), step)
    return weights(backbone), metrics


def test_learning_rate_warms_up_then_follows_a_cosine_to_zero():
    """Hand-worked: 5 warm-up steps of 1e-5; halfway through the cosine it is half; at the end it is 0."""
    rates = [learning_rate(1e-5, step, 105, 5) for step in range(105)]
    assert rates[:5] == pytest.approx([2e-6, 4e-6, 6e-6, 8e-6, 1e-5])
    assert rates[5] == pytest.approx(1e-5)
    assert rates[55] == pytest.approx(5e-6)
    assert learning_rate(1e-5, 105, 105, 5) == pytest.approx(0.0, abs=1e-20)
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))


def test_alternating_trains_one_role_at_a_time():
    config = changed(UPDATE, schedule="alternating", alternate_every=2)
    assert [trained_role(config, s) for s in range(6)] == [Role.SOLVER] * 2 + [Role.QUESTIONER] * 2 + [Role.SOLVER] * 2
    assert trained_role(UPDATE, 3) is None
    backbone = tiny_backbone()
    metrics = Trainer(backbone, config, 10).update(some_rollouts(backbone, 9), 0)
    assert metrics["trained_rollouts"] == 4


def test_one_update_is_on_policy():
    """With recomputed log-probabilities and one update the ratio is exactly 1 and nothing is clipped."""
    _, metrics = updated()
    assert metrics["ratio_mean"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["updates"] == 1


def test_several_updates_move_away_from_the_rollout_policy():
    """From the second update on the ratio leaves 1 and GSPO's tight clip acts."""
    _, metrics = updated(changed(UPDATE, updates_per_step=3))
    assert metrics["updates"] == 3
    assert metrics["ratio_mean"] != 1.0
    assert metrics["clip_fraction"] > 0


def test_micro_batches_do_not_change_the_update():
    whole, found = updated(changed(UPDATE, tokens_per_microbatch=100_000))
    single, alone = updated(changed(UPDATE, tokens_per_microbatch=1))
    assert relative_difference(weights(tiny_backbone()), whole, single) < 1e-3
    assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_gradient_checkpointing_does_not_change_the_update():
    plain, found = updated()
    backbone = tiny_backbone()
    start = weights(backbone)
    metrics = Trainer(backbone, changed(UPDATE, gradient_checkpointing="on"), 10).update(some_rollouts(backbone), 0)
    assert relative_difference(start, plain, weights(backbone)) < 1e-3
    assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_rewarded_tokens_become_likelier_and_punished_ones_less_likely():
    backbone = tiny_backbone()
    good, bad = rollout(backbone, 0, 1.0), rollout(backbone, 1, -1.0)

    def logprob(r):
        batch = backbone.collate([(backbone.encode(r.prompt), r.completion.token_ids)], "right")
        with torch.no_grad():
            return float(backbone.completion_logprobs(batch, POLICY).sum())

    before = logprob(good), logprob(bad)
    trainer = Trainer(backbone, UPDATE, total_steps=10)
    for step in range(3):
        trainer.update([good, bad], step)
    assert logprob(good) > before[0] + 0.01
    assert logprob(bad) < before[1] - 0.01


def test_nothing_retained_moves_nothing_but_the_schedule():
    backbone = tiny_backbone()
    before = weights(backbone)
    metrics = Trainer(backbone, changed(UPDATE, warmup_steps=5), 10).update([], 1)
    assert largest_difference(before, weights(backbone)) == 0
    assert metrics["updates"] == 0
    assert metrics["lr"] == pytest.approx(4e-4)


def test_a_prompt_seen_differently_by_the_engine_is_refused():
    """Training on other prompt tokens than those sampled from would be silently off-policy."""
    backbone = tiny_backbone()
    good = rollout(backbone, 0, 1.0)
    completion = dataclasses.replace(good.completion, prompt_token_ids=good.completion.prompt_token_ids[:-1])
    with pytest.raises(TrainingError, match="same processor"):
        Trainer(backbone, UPDATE, 10).update([dataclasses.replace(good, completion=completion)], 0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_loss_stops_before_any_weight_moves(poison):
    backbone = tiny_backbone()
    trainer = Trainer(backbone, UPDATE, 10)
    name, parameter = backbone.trainable_parameters()[0]
    with torch.no_grad():
        parameter[0, 0] = poison
    before = weights(backbone)
    with pytest.raises(TrainingError, match="nothing was saved"):
        trainer.update(some_rollouts(backbone), 0)
    after = weights(backbone)
    assert all(torch.equal(before[k], after[k]) for k in before if k != name)


def test_optimizer_state_round_trip_continues_bit_for_bit():
    straight, _ = updated(steps=2)
    backbone = tiny_backbone()
    trainer = Trainer(backbone, UPDATE, 10)
    trainer.update(some_rollouts(backbone), 0)
    tensors, meta = trainer.state()
    adapter = backbone.adapter_state(POLICY)
    fresh = tiny_backbone(seed=99)
    resumed = Trainer(fresh, UPDATE, 10)
    fresh.load_adapter_state(POLICY, adapter)
    resumed.load_state(tensors, meta)
    resumed.update(some_rollouts(fresh), 1)
    assert largest_difference(straight, weights(fresh)) == 0


def _worker(rank, world, port, shares, config, early, folder):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    backbone = tiny_backbone()
    trainer = Trainer(backbone, config, 10, Workers.from_environment())
    mine = [r for r, owner in zip(some_rollouts(backbone), shares, strict=True) if owner == rank]
    if early:
        update = trainer.begin(0)
        for rollout in mine:
            update.add([rollout])
        metrics = update.finish()
    else:
        metrics = trainer.update(mine, 0)
    torch.save((weights(backbone), metrics), f"{folder}/{rank}.pt")


def of_two_workers(folder, shares, config=UPDATE, early=False):
    """Weights and metrics of each of two gloo processes, whose adapters must agree bit for bit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_worker, args=(2, port, shares, config, early, folder), nprocs=2)
    results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    assert largest_difference(results[0][0], results[1][0]) == 0
    return results


MIXED, LOPSIDED = [0, 1, 0, 0, 1, 1, 0, 1, 1], [0] * 9


@pytest.mark.parametrize(
    ("shares", "updates", "early"),
    [(MIXED, 1, False), (LOPSIDED, 1, False), (LOPSIDED, 2, False), (MIXED, 1, True), (LOPSIDED, 1, True)],
)
def test_two_workers_make_the_update_of_one(tmp_path, shares, updates, early):
    """The same recorded rollouts, shared unevenly over two gloo workers (one may have none): the same update."""
    config = changed(UPDATE, updates_per_step=updates)
    alone, metrics = updated(config)
    results = of_two_workers(tmp_path, shares, config, early)
    assert relative_difference(weights(tiny_backbone()), alone, results[0][0]) < 1e-3
    for _, found in results:
        assert found["trained_rollouts"] == 9
        assert found["updates"] == updates
        assert found["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
        assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_the_papers_reduction_averages_the_workers_own_means(tmp_path):
    """By hand: 4 rollouts here and 5 there; the gradient is half the sum of both means, not the mean of all nine."""
    config = changed(UPDATE, loss_reduction="per_worker", max_grad_norm=1e9)

    def mean_gradient(rank):
        backbone = tiny_backbone()
        mine = [r for r, owner in zip(some_rollouts(backbone), MIXED, strict=True) if owner == rank]
        Trainer(backbone, changed(config, loss_reduction="global"), 10).update(mine, 0)
        return torch.cat([p.grad.flatten() for _, p in backbone.trainable_parameters()])

    expected = float(((mean_gradient(0) + mean_gradient(1)) / 2).norm())
    _, of_all_nine = updated(changed(config, loss_reduction="global"))
    for _, found in of_two_workers(tmp_path, MIXED, config):
        assert found["grad_norm"] == pytest.approx(expected, rel=1e-4)
        assert found["grad_norm"] != pytest.approx(of_all_nine["grad_norm"], rel=1e-3)


def test_a_backward_pass_that_runs_out_of_memory_says_what_to_change(monkeypatch):
    """Gradients are partly summed by then, so it can't be repeated: the step ends and the last checkpoint stands."""
    backbone = tiny_backbone()
    start = weights(backbone)

    class Short(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("made up")

    original = backbone.completion_logprobs
    monkeypatch.setattr(backbone, "completion_logprobs", lambda *args: Short.apply(original(*args)))
    with pytest.raises(TrainingError, match=r"update\.gradient_checkpointing=on"):
        Trainer(backbone, UPDATE, 10).update(some_rollouts(backbone, 2), 0)
    assert largest_difference(start, weights(backbone)) == 0


def test_a_row_that_fits_in_no_way_says_what_to_change(monkeypatch):
    """Out of memory even with every layer recomputed."""
    backbone = tiny_backbone()

    def never(batch, adapter):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(backbone, "completion_logprobs", never)
    config = changed(UPDATE, gradient_checkpointing="auto")
    with pytest.raises(TrainingError, match=r"update\.tokens_per_microbatch"):
        Trainer(backbone, config, 10).update(some_rollouts(backbone, 2), 0)


def test_memory_of_a_container_counts_on_a_cpu(monkeypatch, tmp_path):
    """A small container on a large host has what its own limit leaves."""
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory(torch.device("cpu")) == 2000
    assert machine.inspect_machine(tmp_path).free_memory_gib == 2000 / 2**30, "doctor says the same"
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(torch.device("cpu")) > 2000


def test_a_forward_pass_that_runs_out_of_memory_is_repeated_with_recomputed_layers(monkeypatch):
    """The memory estimate may be too low: the update goes on, and is the same update."""
    config = changed(UPDATE, gradient_checkpointing="auto")
    plain, _ = updated(config)
    backbone = tiny_backbone()
    original, recomputed = backbone.completion_logprobs, []

    def short_of_memory(batch, adapter):
        recomputed.append(backbone._layers.num_recomputed)
        if recomputed[-1] == 0:
            raise torch.OutOfMemoryError("made up")
        return original(batch, adapter)

    monkeypatch.setattr(backbone, "completion_logprobs", short_of_memory)
    start = weights(backbone)
    metrics = Trainer(backbone, config, 10).update(some_rollouts(backbone), 0)
    assert recomputed[:2] == [0, len(backbone._layers)]
    assert metrics["memory/retries"] == recomputed.count(0) > 0
    assert relative_difference(start, plain, weights(backbone)) < 1e-3


def test_the_allocators_cache_is_emptied_before_a_batch_larger_than_all_before(monkeypatch):
    """Blocks of smaller batches are of no use to it; within an update the largest comes first."""
    backbone = tiny_backbone()
    trainer, lengths, emptied = Trainer(backbone, UPDATE, 10), [], []
    original = backbone.completion_logprobs

    def watched(batch, adapter):
        lengths.append(batch.input_ids.numel())
        return original(batch, adapter)

    monkeypatch.setattr(backbone, "completion_logprobs", watched)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(lengths)))
    for count in (2, 2, 9, 2):
        assert trainer.update(some_rollouts(backbone, count), 0)["memory/retries"] == 0
    records = [i for i, n in enumerate(lengths) if n > max(lengths[:i], default=0)]
    assert emptied == records
    assert len(records) == 2


def test_rows_that_would_not_fit_are_recomputed(monkeypatch):
    """``auto`` looks at the memory that is free: with none every layer is recomputed, with plenty none."""
    found = []
    for free in (0.0, 1e12):
        monkeypatch.setattr(trainer_module, "free_memory", lambda device, free=free: free)
        backbone = tiny_backbone()
        Trainer(backbone, changed(UPDATE, gradient_checkpointing="auto"), 10).update(some_rollouts(backbone, 2), 0)
        found.append(backbone._layers.num_recomputed)
    assert found == [len(backbone._layers), 0]
