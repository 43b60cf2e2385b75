"""The update's modes besides the default one: engine log-probabilities, reductions, what is refused."""

import dataclasses
import math

import pytest
import torch
from loop_factory import UPDATE, largest_difference, some_rollouts, tiny_backbone, weights

from trinity_vlm.config import load_config
from trinity_vlm.errors import ConfigError, TrainingError
from trinity_vlm.trainer import Trainer
from trinity_vlm.types import POLICY

ENGINE = UPDATE.model_copy(update={"old_logprobs": "engine"})


def with_logprobs(backbone, rollouts, shift):
    """The rollouts as an engine would return them, its log-probabilities ``shift`` nat above the trainer's."""
    found = []
    for rollout in rollouts:
        batch = backbone.collate([(backbone.encode(rollout.prompt), rollout.completion.token_ids)], "right")
        with torch.no_grad():
            values = backbone.completion_logprobs(batch, POLICY)[0].tolist()
        completion = dataclasses.replace(rollout.completion, logprobs=tuple(v + shift for v in values))
        found.append(dataclasses.replace(rollout, completion=completion))
    return found


def updated(config, shift=None, count=6):
    """Weights and metrics after one update; ``shift`` None: rollouts without log-probabilities."""
    backbone = tiny_backbone()
    rollouts = some_rollouts(backbone, count)
    if shift is not None:
        rollouts = with_logprobs(backbone, rollouts, shift)
    metrics = Trainer(backbone, config, total_steps=10).update(rollouts, 0)
    return weights(backbone), metrics


@pytest.mark.parametrize("shift", [0.1, -0.1])
def test_engine_logprobs_are_the_denominator_of_the_ratio(shift):
    """Shifted by s, every token's log-ratio is -s: ratio exp(-s), KL estimate exp(-s) + s - 1 (Eq. 3)."""
    _, metrics = updated(ENGINE, shift)
    assert metrics["ratio_mean"] == pytest.approx(math.exp(-shift), abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(math.exp(-shift), abs=1e-5)
    assert metrics["kl"] == pytest.approx(math.exp(-shift) + shift - 1, abs=1e-5)


def test_the_clip_and_the_regularizer_act_on_engine_logprobs():
    """At ratio exp(0.1), clipped at 1.0004, positive advantages lose their gradient: 3 of 6 rollouts."""
    _, metrics = updated(ENGINE, -0.1)
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert largest_difference(updated(ENGINE, -0.1)[0], updated(UPDATE, -0.1)[0]) > 1e-5


def test_exact_engine_logprobs_make_the_recomputed_update():
    """Engine log-probabilities of the same weights: the ratio is 1 within rounding and so is the gradient."""
    _, recomputed = updated(UPDATE)
    _, engine = updated(ENGINE.model_copy(update={"clip_low": 0.5, "clip_high": 0.5}), 0.0)
    assert engine["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert engine["grad_norm"] == pytest.approx(recomputed["grad_norm"], rel=1e-3)


def test_rollouts_without_engine_logprobs_are_refused():
    backbone = tiny_backbone()
    before = weights(backbone)
    with pytest.raises(TrainingError, match="old_logprobs=engine: this needs the engine's log-probabilities"):
        Trainer(backbone, ENGINE, 10).update(some_rollouts(backbone, 2), 0)
    assert largest_difference(before, weights(backbone)) == 0


@pytest.mark.parametrize("config", [UPDATE, ENGINE], ids=["recomputed", "engine"])
def test_engine_gap_is_the_mean_absolute_difference(config):
    """By hand: all log-probabilities 0.1 nat off, over completions of different lengths, is a gap of 0.1."""
    _, metrics = updated(config, 0.1)
    assert metrics["engine_gap"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["engine_gap_max"] == pytest.approx(0.1, abs=1e-4)


def test_engine_gap_is_weighted_by_tokens_and_its_maximum_is_of_one_token():
    """One token of one rollout 0.6 nat off: the mean is 0.6 / all tokens, the maximum 0.6."""
    backbone = tiny_backbone()
    first, *others = with_logprobs(backbone, some_rollouts(backbone, 3), 0.0)
    values = list(first.completion.logprobs)
    values[1] -= 0.6
    changed = dataclasses.replace(first, completion=dataclasses.replace(first.completion, logprobs=tuple(values)))
    tokens = sum(len(r.completion.token_ids) for r in (first, *others))
    metrics = Trainer(backbone, UPDATE, 10).update([changed, *others], 0)
    assert metrics["engine_gap"] == pytest.approx(0.6 / tokens, abs=1e-5)
    assert metrics["engine_gap_max"] == pytest.approx(0.6, abs=1e-4)


def test_no_gap_is_reported_without_engine_logprobs():
    _, metrics = updated(UPDATE)
    assert "engine_gap" not in metrics


def test_per_worker_reduction_in_one_process_is_the_global_one():
    everywhere, _ = updated(UPDATE)
    per_worker, _ = updated(UPDATE.model_copy(update={"loss_reduction": "per_worker"}))
    assert largest_difference(everywhere, per_worker) == 0


def test_dropout_is_refused_before_anything_is_loaded():
    """The engine samples without dropout, so a policy trained with it would be off-policy from the first token."""
    with pytest.raises(ConfigError, match=r"lora\.dropout"):
        load_config("tiny", ["lora.dropout=0.1"])


def test_an_importance_cap_bounds_the_weight_of_unlikely_engine_tokens():
    """Engine log-probabilities 0.1 nat lower: every rollout weighs e^0.1, or the cap, and Adam's first step aside the
    gradient scales with it. Without engine log-probabilities it is refused."""
    _, plain = updated(UPDATE, -0.1)
    _, weighted = updated(UPDATE.model_copy(update={"importance_cap": 2.0}), -0.1)
    _, capped = updated(UPDATE.model_copy(update={"importance_cap": 1.05}), -0.1)
    assert (weighted["importance_weight"], capped["importance_weight"]) == pytest.approx(
        (math.exp(0.1), 1.05), rel=1e-5
    )
    assert "importance_weight" not in plain
    assert weighted["grad_norm"] == pytest.approx(plain["grad_norm"] * math.exp(0.1), rel=1e-4)
    assert capped["grad_norm"] == pytest.approx(plain["grad_norm"] * 1.05, rel=1e-4)
    backbone = tiny_backbone()
    trainer = Trainer(backbone, UPDATE.model_copy(update={"importance_cap": 2.0}), 10)
    with pytest.raises(ConfigError, match=r"importance_cap=2\.0 with update\.old_logprobs=engine"):
        load_config("tiny", ["update.importance_cap=2", "update.old_logprobs=engine"])
    with pytest.raises(TrainingError, match="importance_cap"):
        trainer.update(some_rollouts(backbone, 2), 0)
