"""Adapters: inert at first, exact deltas, strict states, gradients to the policy only."""

from __future__ import annotations

import pytest
import torch
from tiny_families import ask, load, picture, randomize

from trinity_vlm.ema import LowRank
from trinity_vlm.errors import EngineError


def scores(backbone, adapter):
    """Log-probabilities of a fixed sequence."""
    batch = backbone.collate([(backbone.encode(ask("How many?", picture(1))), [5, 6, 7])], "right")
    with torch.no_grad():
        return backbone.completion_logprobs(batch, adapter)[0]


def test_fresh_adapters_equal_the_base_model(any_family):
    """Zero deltas, bit for bit."""
    any_family.add_adapter("verifier", 8, 8.0)
    base = scores(any_family, None)
    assert torch.equal(scores(any_family, "policy"), base)
    assert torch.equal(scores(any_family, "verifier"), base)


def test_set_factors_adds_exactly_that_delta(qwen):
    """The verifier with factors D equals the base model with W + D, in every adapted layer."""
    qwen.add_adapter("verifier", 6, 12.0)
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: LowRank(
            torch.randn(f.left.shape[0], 6, generator=generator) * 0.1,
            torch.randn(6, f.right.shape[1], generator=generator) * 0.1,
        )
        for name, f in qwen.factors("verifier").items()
    }
    base = scores(qwen, None)
    qwen.set_factors("verifier", factors)
    found = scores(qwen, "verifier")
    modules = dict(qwen.model.get_base_model().named_modules())
    for name, factor in factors.items():
        modules[name].base_layer.weight.data += factor.product()
    assert (found - base).abs().max() > 1e-2
    torch.testing.assert_close(found, scores(qwen, None), atol=1e-5, rtol=0)


def test_factors_fold_the_scaling_and_round_trip(qwen):
    """left = (alpha / r) B; what is read back is what was set."""
    randomize(qwen, "policy", 1)
    state, factors = qwen.adapter_state("policy"), qwen.factors("policy")
    name = next(iter(factors))
    torch.testing.assert_close(factors[name].left, state[f"base_model.model.{name}.lora_B.weight"] * 8 / 4)
    torch.testing.assert_close(factors[name].right, state[f"base_model.model.{name}.lora_A.weight"])
    qwen.add_adapter("verifier", 4, 20.0)
    qwen.set_factors("verifier", factors)
    for name, again in qwen.factors("verifier").items():
        torch.testing.assert_close(again.product(), factors[name].product())
    torch.testing.assert_close(scores(qwen, "verifier"), scores(qwen, "policy"), atol=1e-5, rtol=0)


def test_smaller_ranks_fit_and_larger_ones_are_refused(qwen):
    """Missing columns are zero, also when the adapter held something before."""
    qwen.add_adapter("verifier", 6, 6.0)
    randomize(qwen, "verifier", 2)
    randomize(qwen, "policy", 1)
    policy = qwen.factors("policy")
    qwen.set_factors("verifier", policy)
    torch.testing.assert_close(scores(qwen, "verifier"), scores(qwen, "policy"), atol=1e-5, rtol=0)
    qwen.add_adapter("small", 2, 2.0)
    with pytest.raises(EngineError, match="rank 4 does not fit adapter 'small' of rank 2"):
        qwen.set_factors("small", policy)


def test_ranks_per_layer(qwen):
    """A mapping gives every layer its own rank; a layer left out is an error."""
    names = list(qwen.factors("policy"))
    ranks = {name: 3 + i for i, name in enumerate(names)}
    qwen.add_adapter("verifier", ranks, 5.0)
    assert {name: f.rank for name, f in qwen.factors("verifier").items()} == ranks
    with pytest.raises(EngineError, match=names[0]):
        qwen.add_adapter("other", dict.fromkeys(names[1:], 2), 5.0)


def test_state_round_trips_under_peft_keys(qwen):
    """Saved names are PEFT's own; a copy is unaffected by later training."""
    import peft

    randomize(qwen, "policy", 1)
    state = qwen.adapter_state("policy")
    published = peft.get_peft_model_state_dict(qwen.model, adapter_name="policy")
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in published.items()}
    before = scores(qwen, "policy")
    randomize(qwen, "policy", 2)
    assert not torch.equal(scores(qwen, "policy"), before)
    qwen.load_adapter_state("policy", state)
    assert torch.equal(scores(qwen, "policy"), before)


@pytest.mark.parametrize("damage", ["missing", "prefix", "shape"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(qwen, damage):
    """Every key must match: a silently ignored tensor would leave the old weights in place."""
    randomize(qwen, "policy", 1)
    before = qwen.adapter_state("policy")
    state = {k: v + 1 for k, v in before.items()}
    first = next(iter(state))
    if damage == "missing":
        del state[first]
    elif damage == "prefix":
        state = {k.removeprefix("base_model."): v for k, v in state.items()}
    else:
        state[first] = state[first][:1]
    with pytest.raises(EngineError, match={"missing": "1 of 28", "prefix": "28 are foreign", "shape": first}[damage]):
        qwen.load_adapter_state("policy", state)
    assert all(torch.equal(v, before[k]) for k, v in qwen.adapter_state("policy").items())


def test_unknown_adapters_are_named(qwen):
    """Nothing runs under a wrong name."""
    with pytest.raises(EngineError, match="unknown adapter 'critic'; loaded are policy"):
        scores(qwen, "critic")
    with pytest.raises(EngineError, match="exists already"):
        qwen.add_adapter("policy", 4, 4.0)


def test_full_parameter_mode_has_no_adapters(family_directory):
    """lora=None: asking for an adapter is an error, the bare model is not."""
    backbone = load(family_directory("qwen3_vl"), None)
    assert torch.isfinite(scores(backbone, None)).all()
    with pytest.raises(EngineError, match="full-parameter"):
        scores(backbone, "policy")


def test_gradients_reach_the_policy_only(qwen):
    """Also after a look at the verifier and the base model, and after an error inside a block."""
    qwen.add_adapter("verifier", 4, 4.0)
    randomize(qwen, "policy", 1)
    randomize(qwen, "verifier", 2)
    scores(qwen, "verifier")
    scores(qwen, None)
    with pytest.raises(RuntimeError, match="inside"), qwen.use_adapter("verifier"):
        raise RuntimeError("inside")
    batch = qwen.collate([(qwen.encode(ask("How many?", picture(1))), [5, 6, 7])], "right")
    qwen.completion_logprobs(batch, "policy").sum().backward()
    policy = {id(p) for _, p in qwen.trainable_parameters()}
    assert all(p.grad is not None and p.grad.any() for _, p in qwen.trainable_parameters())
    assert [n for n, p in qwen.model.named_parameters() if p.grad is not None and id(p) not in policy] == []


def test_other_adapters_give_values_without_gradients(qwen):
    """The verifier never trains, even when called with gradients on."""
    qwen.add_adapter("verifier", 4, 4.0)
    batch = qwen.collate([(qwen.encode(ask("How many?", picture(1))), [5, 6, 7])], "right")
    assert qwen.completion_logprobs(batch, "policy").requires_grad
    assert not qwen.completion_logprobs(batch, "verifier").requires_grad
    assert not qwen.completion_logprobs(batch, None).requires_grad


def test_adding_an_adapter_leaves_the_others_alone(qwen):
    """Same policy values and trainable tensors as before."""
    randomize(qwen, "policy", 1)
    before, trainable = scores(qwen, "policy"), [id(p) for _, p in qwen.trainable_parameters()]
    qwen.add_adapter("verifier", 8, 8.0)
    assert torch.equal(scores(qwen, "policy"), before)
    assert {id(p) for p in qwen.model.parameters() if p.requires_grad} == set(trainable)


def test_blocks_nest_and_restore(qwen):
    """The adapter of the outer block is active again after the inner one."""
    qwen.add_adapter("verifier", 4, 4.0)
    randomize(qwen, "verifier", 2)
    verifier = scores(qwen, "verifier")
    with qwen.use_adapter("verifier"):
        assert not any(p.requires_grad for p in qwen.model.parameters())
        scores(qwen, "policy")
        scores(qwen, None)
        batch = qwen.collate([(qwen.encode(ask("How many?", picture(1))), [5, 6, 7])], "right")
        with torch.no_grad():
            hidden = qwen.hidden_states(batch)
        logits = qwen.logits(hidden[0, batch.predicted_at[0]]).log_softmax(-1)
    torch.testing.assert_close(logits.gather(1, torch.tensor([[5], [6], [7]]))[:, 0], verifier, atol=1e-5, rtol=0)
