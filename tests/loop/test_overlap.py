"""Backward passes of finished episodes while others still generate: the same update, one setting."""

import asyncio
import threading

import pytest
import torch
from loop_factory import UPDATE, relative_difference, small_config, some_rollouts, tiny_backbone, weights

from trinity_vlm.assembly import assemble
from trinity_vlm.backbone import Backbone
from trinity_vlm.config import load_config
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.errors import ConfigError, TrainingError
from trinity_vlm.loop import outer_step
from trinity_vlm.overlap import EarlyUpdate, LateUpdate, overlaps, step_update
from trinity_vlm.trainer import Trainer


def after_update(make, rollouts, groups):
    """Weights and metrics after one step whose rollouts arrive in ``groups`` of indices."""
    backbone = tiny_backbone()
    rows = rollouts(backbone)
    trainer = Trainer(backbone, UPDATE, 10)

    async def arrive(update):
        for group in groups:
            await update.take([rows[i] for i in group])

    with make(trainer, 0) as update:
        asyncio.run(arrive(update))
        metrics = update.finish(rows)
    return weights(backbone), metrics


@pytest.mark.parametrize("groups", [[range(9)], [[8, 1], [], [0, 2, 3, 4], [7], [5, 6]]])
def test_an_early_update_is_the_late_update_in_another_order_of_summation(groups):
    late, expected = after_update(LateUpdate, some_rollouts, groups)
    early, found = after_update(EarlyUpdate, some_rollouts, groups)
    assert relative_difference(weights(tiny_backbone()), late, early) < 1e-3
    assert found.pop("seconds/backward") > 0
    assert found == pytest.approx(expected, rel=1e-4)


def test_backward_passes_run_beside_the_event_loop():
    """While an episode's gradients are computed other episodes go on: the loop's thread is never taken."""
    backbone = tiny_backbone()
    rows = some_rollouts(backbone, 4)
    threads, order = set(), []
    original = backbone.completion_logprobs

    def watched(batch, adapter):
        threads.add(threading.current_thread())
        order.append("backward")
        released.wait(timeout=60)
        return original(batch, adapter)

    released = threading.Event()
    backbone.completion_logprobs = watched

    async def step(update):
        taking = asyncio.ensure_future(update.take(rows))
        while not order:
            await asyncio.sleep(0.001)
        order.append("another episode")
        released.set()
        await taking

    with EarlyUpdate(Trainer(backbone, UPDATE, 10), 0) as update:
        asyncio.run(step(update))
        update.finish(rows)
    assert order[:2] == ["backward", "another episode"]
    assert threading.current_thread() not in threads


def test_an_error_in_an_early_backward_pass_stops_the_step():
    backbone = tiny_backbone()
    rows = some_rollouts(backbone, 4)
    with torch.no_grad():
        for _, parameter in backbone.trainable_parameters():
            parameter.fill_(torch.nan)
    with EarlyUpdate(Trainer(backbone, UPDATE, 10), 0) as update, pytest.raises(TrainingError, match="the loss is nan"):
        asyncio.run(update.take(rows))


def test_nothing_retained_is_no_step():
    backbone = tiny_backbone()
    start = weights(backbone)
    with EarlyUpdate(Trainer(backbone, UPDATE, 10), 0) as update:
        asyncio.run(update.take([]))
        metrics = update.finish([])
    assert metrics["updates"] == 0
    assert all(torch.equal(a, b) for a, b in zip(start.values(), weights(backbone).values(), strict=True))


def test_several_updates_can_not_begin_early():
    trainer = Trainer(tiny_backbone(), UPDATE.model_copy(update={"updates_per_step": 2}), 10)
    with pytest.raises(ValueError, match="updates_per_step=2"):
        trainer.begin(0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), False),
        (("engine.kind=vllm",), True),
        (("engine.kind=vllm", "update.overlap=off"), False),
        (("engine.kind=vllm", "engine.layout=paper"), False),
        (("engine.kind=vllm", "update.updates_per_step=2"), False),
        (("engine.kind=my_module:engine",), False),
        (("engine.kind=my_module:engine", "update.overlap=on"), True),
        (("engine.kind=openai", "engine.servers={urls: ['http://127.0.0.1:1'], model: m}"), True),
    ],
)
def test_overlap_is_automatic_where_the_engine_has_a_model_of_its_own(overrides, expected):
    config = load_config("tiny", overrides)
    assert overlaps(config) is expected
    made = step_update(Trainer(tiny_backbone(), config.update, 10), 0, config)
    assert isinstance(made, EarlyUpdate if expected else LateUpdate)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("update.overlap=on",), "engine.kind=transformers"),
        (("engine.kind=vllm", "update.overlap=on", "update.updates_per_step=2"), "updates_per_step=2"),
        (("update.overlap=maybe",), "update.overlap='maybe'"),
    ],
)
def test_impossible_overlap_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("tiny", overrides)


def engine_with_its_own_model(backbone, config):
    """What a server is to a run: the same checkpoint, loaded once more."""
    own = Backbone.load(config.model, config.lora, config.seed)
    for name in backbone.adapter_names:
        if name not in own.adapter_names:
            ranks = {layer: pair.rank for layer, pair in backbone.factors(name).items()}
            own.add_adapter(name, ranks, alpha=float(max(ranks.values())))
    return TransformersEngine(own, config.engine.max_batch_sequences, config.engine.cuda_graphs)


def test_a_step_learns_the_same_with_and_without_overlap():
    """A whole step over an engine with its own model: same episodes, same metrics, same weights up to rounding."""

    def step(overlap):
        kind = f"{__name__}:engine_with_its_own_model"
        with assemble(small_config(f"engine.kind={kind}", f"update.overlap={overlap}")) as system:
            system.serve(0)
            start = weights(system.backbone)
            result = outer_step(system, 0)
            return start, weights(system.backbone), result.metrics

    (start, late, expected), (_, early, found) = step("off"), step("on")
    assert found["trained_rollouts"] > 0
    assert ("seconds/backward" in expected, "seconds/backward" in found) == (False, True)
    assert relative_difference(start, late, early) < 1e-3
    same = {key for key in expected if not key.startswith(("seconds/", "memory/"))}
    assert {key: found[key] for key in same} == pytest.approx({key: expected[key] for key in same}, rel=1e-3, abs=1e-6)


def test_the_updates_thread_has_this_processs_number_of_threads():
    """Compiled layers are of one number: another would be compiled anew. vLLM sets 1 for a moment, at any moment."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with EarlyUpdate(Trainer(tiny_backbone(), load_config("tiny").update, 10), 0) as update:
            torch.set_num_threads(1)
            assert update._thread.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
