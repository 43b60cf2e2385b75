"""Layers of an update: compiled once for all, recomputed where asked, and invisible to everything else."""

import pytest
import torch
from tiny_families import ask, load, model_config, picture, randomize
from torch._dynamo.utils import counters

from trinity_vlm.activations import COMPILED, ActivationModel
from trinity_vlm.backbone import Backbone
from trinity_vlm.config import LoraConfig


def scored(backbone, batch):
    """Log-probabilities and gradients of the policy."""
    backbone.model.zero_grad()
    logprobs = backbone.completion_logprobs(batch, "policy")
    (logprobs * torch.arange(1, logprobs.shape[1] + 1)).sum().backward()
    return logprobs.detach(), [p.grad.clone() for _, p in backbone.trainable_parameters()]


def compilations():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def compiled(family_directory):
    """A compiled backbone with policy and verifier loaded, traced by dynamo but run by torch's own kernels."""
    torch._dynamo.reset()
    backbone = load(family_directory("qwen3_vl"))
    backbone.add_adapter("verifier", 3, 6.0)
    randomize(backbone, "policy", 1)
    randomize(backbone, "verifier", 2)
    backbone.compile_layers("eager")
    yield backbone
    torch._dynamo.reset()


def test_one_compilation_serves_all_lengths_layers_and_checkpointing(compiled):
    """Ten rows of different lengths and numbers of completions, none to all layers recomputed."""
    prompts = [compiled.encode(ask("a b " * n, picture(n))) for n in range(1, 6)]
    counters.clear()
    compiled.completion_logprobs(compiled.collate_row(prompts[0], [(5, 6)]), "policy").sum().backward()
    first = compilations()
    assert 0 < first <= 6
    for n, prompt in enumerate(prompts):
        for completions in ([(5,) * (n + 1)], [(5, 6, 7), (8,) * (2 * n + 1), (9, 10)][: 2 + n % 2]):
            compiled._layers.num_recomputed = n % (len(compiled._layers) + 1)
            compiled.completion_logprobs(compiled.collate_row(prompt, completions), "policy").sum().backward()
    assert compilations() == first


def test_compiled_layers_change_nothing(compiled, family_directory):
    """The same values and gradients as layers that are not compiled, kept or recomputed."""
    plain = load(family_directory("qwen3_vl"))
    randomize(plain, "policy", 1)
    completions = [(5, 6, 7, 8), (9,)]
    expected, gradients = scored(plain, plain.collate_row(plain.encode(ask("a", picture(2))), completions))
    for num_recomputed in (0, 2):
        compiled._layers.num_recomputed = num_recomputed
        batch = compiled.collate_row(compiled.encode(ask("a", picture(2))), completions)
        found, found_gradients = scored(compiled, batch)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        for gradient, reference in zip(found_gradients, gradients, strict=True):
            torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)


def test_nothing_else_meets_compiled_layers(compiled):
    """Generation finds the layers as they were, nothing set on them; padded batches compile nothing either."""
    prompt = compiled.encode(ask("a", picture(2)))
    before = compilations()
    with torch.no_grad(), compiled.use_adapter("verifier"):
        compiled.hidden_states(compiled.collate([(prompt, ())], "left"))
    compiled.completion_logprobs(compiled.collate([(prompt, (5,)), (prompt, (6, 7))], "right"), "policy")
    assert compilations() == before
    assert all("forward" not in vars(layer) for layer in compiled._base.get_decoder().layers)


def test_layers_are_restored_after_an_error(qwen):
    """A failing forward pass leaves the model usable."""
    batch = qwen.collate([(qwen.encode(ask("a")), (5,))], "right")
    batch.input_ids[0, 0] = 10**6
    with pytest.raises(IndexError):
        qwen.completion_logprobs(batch, "policy")
    assert all("forward" not in vars(layer) for layer in qwen._base.get_decoder().layers)


def test_as_many_layers_are_recomputed_as_asked(qwen):
    """Each recomputed layer runs twice, the others once; without gradients nothing runs again."""
    counts = []
    for index, layer in enumerate(qwen._base.get_decoder().layers):
        counts.append(0)
        layer.input_layernorm.register_forward_pre_hook(
            lambda *_, index=index: counts.__setitem__(index, counts[index] + 1)
        )
    qwen._layers.num_recomputed = 1
    batch = qwen.collate_row(qwen.encode(ask("a", picture(2))), [(5, 6), (7,)])
    qwen.completion_logprobs(batch, "policy").sum().backward()
    assert counts == [2, 1]


def half(directory, rounded):
    backbone = Backbone.load(model_config(directory, dtype="bfloat16"), LoraConfig(rank=4, alpha=8))
    randomize(backbone, "policy", 1)
    backbone.round_adapters(rounded)
    return backbone


def test_rounded_adapters_are_near_float32_ones_and_still_train_in_float32(family_directory):
    """bfloat16 products with the adapter: the same up to bfloat16 rounding, recomputed ones exactly the same."""
    results = []
    for rounded, recompute in ((False, False), (True, False), (True, True)):
        backbone = half(family_directory("qwen3_vl"), rounded)
        backbone.set_gradient_checkpointing(recompute)
        results.append(scored(backbone, backbone.collate_row(backbone.encode(ask("a", picture(2))), [(5, 6), (7,)])))
    full, rounded, recomputed = (torch.cat([g.flatten() for g in gradients]) for _, gradients in results)
    assert rounded.dtype == torch.float32
    assert not torch.equal(full, rounded)
    assert float((full - rounded).norm() / full.norm()) < 0.05
    assert torch.equal(rounded, recomputed)
    torch.testing.assert_close(results[0][0], results[1][0], atol=0.1, rtol=0)


def kept_bytes(backbone, batch):
    """Memory of all tensors that the backward pass will need, parameters aside."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = backbone.completion_logprobs(batch, "policy")
    assert logprobs.requires_grad
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


def test_activation_bytes_are_near_what_is_kept(family_directory):
    """Of a long row on uncompiled bfloat16 layers; recomputing keeps a small part of it, as estimated."""
    backbone = half(family_directory("qwen3_vl"), rounded=False)
    batch = backbone.collate_row(backbone.encode(ask("a", picture(2))), [(5,) * 200])
    tokens = batch.input_ids.shape[1]
    layers = len(backbone._layers)
    in_flight = 2 * (backbone.activation_bytes(tokens, False) - backbone._activation_bytes(tokens, 1, True))
    estimates = [backbone._activation_bytes(tokens, n, True) - in_flight for n in range(layers + 1)]
    assert kept_bytes(backbone, batch) == pytest.approx(estimates[0], rel=0.35)
    assert estimates == sorted(estimates, reverse=True)


def test_as_few_layers_are_recomputed_as_the_budget_allows(qwen):
    """The fewest that fit; none with room enough, all where nothing fits."""
    prompt = qwen.encode(ask("How many?"))
    batch = qwen.collate([(prompt, range(50, 90)), (prompt, range(50, 60))], "right")
    tokens = 2 * (len(prompt.input_ids) + 40)
    needs = [qwen._activation_bytes(tokens, n, False) for n in range(len(qwen._layers) + 1)]
    assert [qwen.fit_checkpointing(batch, need) for need in needs] == [0, 1, 2]
    assert qwen.fit_checkpointing(batch, needs[1] - 1) == 2
    assert qwen.fit_checkpointing(batch, 0) == 2


def test_padded_batches_are_planned_without_compiled_layers(family_directory):
    """They run as they are, and keep more: with what a compiled row of as many tokens needs they would run out."""
    backbone = load(family_directory("qwen3_vl"))
    prompt = backbone.encode(ask("How many?"))
    padded = backbone.collate([(prompt, range(50, 90))], "right")
    row = backbone.collate_row(prompt, [range(50, 90)])
    before = backbone._activation_bytes(padded.input_ids.numel(), 0, True)
    backbone.compile_layers("eager")
    enough_for_a_row = backbone.activation_bytes(row.input_ids.numel(), checkpointed=False)
    assert enough_for_a_row < before
    assert backbone.fit_checkpointing(row, enough_for_a_row) == 0
    assert backbone.fit_checkpointing(padded, enough_for_a_row) > 0


def test_the_estimate_for_the_8b_shape():
    """Hand-worked: (6 * 4096 + 4 * 4096 + 5 * 1024 + 2 * 12288) * 2 bytes * 4,096 tokens * (36 + 2) layers."""
    shape = ActivationModel(hidden=4096, query=4096, key=1024, mlp=12_288, num_layers=36, itemsize=2)
    layer = (10 * 4096 + 5 * 1024 + 2 * 12_288) * 2 * 4096
    assert shape.num_bytes(4096, 0, COMPILED) == 38 * layer
    assert shape.num_bytes(4096, 36, COMPILED) == 36 * 4096 * 2 * 4096 + 2 * layer
