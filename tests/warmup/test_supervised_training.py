"""The supervised loop learns, keeps small updates in bfloat16, and follows its schedule."""

from __future__ import annotations

import pytest
import torch
from warmup_factory import Repeated, eight_examples, load_small

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import LoraConfig
from trinity_vlm.errors import ConfigError, TrainingError
from trinity_vlm.supervised import Schedule, SupervisedSettings, train_supervised
from trinity_vlm.supervised.batches import pack
from trinity_vlm.supervised.encoding import ExampleEncoder
from trinity_vlm.supervised.optimizer import MasterAdamW


def settings(steps, lr, **changes):
    return SupervisedSettings(
        Schedule(lr, steps, warmup=3), weight_decay=0.0, betas=(0.9, 0.95), report_every=10, **changes
    )


def test_overfits_eight_examples(backbone, small_model):
    """The loss falls to almost nothing, and greedy decoding would reproduce every completion."""
    reports = []
    train_supervised(backbone, Repeated(eight_examples(), 100), small_model, settings(100, 6e-3), reports.append)
    assert reports[0].loss > 1.0
    assert [r.step for r in reports] == list(range(10, 101, 10))
    assert reports[-1].examples == 800
    with torch.no_grad():
        rows = ExampleEncoder(backbone)(eight_examples())
        logprobs = backbone.completion_logprobs(backbone.collate(rows, "right"), None)
    assert logprobs.min() > -0.3


def test_training_repeats_bit_for_bit(small_model):
    """Same source, same settings: same weights."""
    states = []
    for _ in range(2):
        backbone = load_small(small_model)
        train_supervised(backbone, Repeated(eight_examples(), 4), small_model, settings(4, 1e-3))
        states.append({n: p.detach().clone() for n, p in backbone.trainable_parameters()})
    for name, values in states[0].items():
        assert torch.equal(values, states[1][name]), name


def test_the_end_of_the_turn_is_trained(backbone):
    """Every completion ends with the end-of-turn id; without it the model would never stop."""
    rows = ExampleEncoder(backbone)(eight_examples())
    packed = pack(rows, backbone.pad_id, backbone.dtype)
    last = packed.rows["completion_mask"].sum(dim=1) - 1
    ids = packed.rows["completion_ids"].gather(1, last[:, None])[:, 0]
    assert ids.tolist() == [backbone.tokenizer.eos_token_id] * len(rows)


def test_lora_trains_the_adapter_only(small_model):
    """In LoRA mode the base weights stay bit-identical and the adapter moves."""
    backbone = Backbone.load(small_model, LoraConfig(rank=2, alpha=4))
    trained = {name for name, _ in backbone.trainable_parameters()}
    before = {n: p.detach().clone() for n, p in backbone.model.named_parameters()}
    train_supervised(backbone, Repeated(eight_examples(), 3), small_model, settings(3, 1e-2))
    moved = {n for n, p in backbone.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert len(trained) >= len(moved)


def test_master_weights_keep_what_bfloat16_would_lose():
    """A hundred updates of 1e-4 on a weight of 1.0 move it by 0.01, though each is below bfloat16's step of 0.0078."""
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], Schedule(1e-4, 1_000_000, 0), 0.0, (0.9, 0.95), 1.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.grad is None
    assert torch.allclose(weight.float(), torch.full((2, 2), 0.99), atol=0.004)


def test_a_parameter_without_gradient_is_an_error():
    """A forward pass that skips a tensor would leave it untrained without a word."""
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = MasterAdamW([used, unused], Schedule(1e-3, 10, 0), 0.0, (0.9, 0.95), 1.0)
    used.grad = torch.ones(2)
    with pytest.raises(TrainingError, match="1 of 2"):
        optimizer.step()


def test_vectors_get_no_weight_decay():
    """Norm gains and biases keep their size under pure decay, matrices shrink by lr * decay."""
    vector, matrix = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = MasterAdamW([vector, matrix], Schedule(0.1, 10, 0), 0.5, (0.9, 0.95), 1.0)
    vector.grad, matrix.grad = torch.zeros(2), torch.zeros(2, 2)
    optimizer.step()
    assert vector.tolist() == [1.0, 1.0]
    assert matrix.flatten().tolist() == pytest.approx([0.95] * 4)


def test_schedule_by_hand():
    """Ten steps, two of warm-up: half, full, then a cosine that is down to a half midway and ends at its floor."""
    schedule = Schedule(1.0, 10, 2, floor=0.1)
    assert schedule.at(0) == 0.5
    assert schedule.at(1) == 1.0
    assert schedule.at(2) == 1.0
    assert schedule.at(6) == pytest.approx(0.5)
    assert schedule.at(10) == 0.1


@pytest.mark.parametrize("values", [(0.0, 10, 1), (1e-3, 0, 0), (1e-3, 10, -1)])
def test_impossible_schedules_are_refused(values):
    with pytest.raises(ConfigError, match="lr > 0"):
        Schedule(*values)


def test_an_empty_source_is_an_error(backbone, small_model):
    with pytest.raises(TrainingError, match="no batch"):
        train_supervised(backbone, Repeated([], 0), small_model, settings(1, 1e-3))
