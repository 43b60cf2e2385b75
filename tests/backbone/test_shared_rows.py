"""One prompt and its completions in one row without a mask: values and gradients are those of separate rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import ask, load, model_config, picture, randomize

from trinity_vlm.backbone import Backbone
from trinity_vlm.backbone.shared_attention import Segments, attend
from trinity_vlm.config import LoraConfig

COMPLETIONS = [(5, 6, 7), (8,), (9, 10, 11, 12, 13), (5, 9)]


def rows(backbone):
    """Three prompts, two over pictures of their own and one of text only, with one to four completions."""
    prompts = [ask("How many red circles are there?", picture(1)), ask("a", picture(2)), ask("text only: 1 2 3")]
    return [(backbone.encode(p), COMPLETIONS[i:]) for i, p in enumerate(prompts)] + [
        (backbone.encode(prompts[0]), COMPLETIONS[:1])
    ]


def scored(backbone, batches):
    """Log-probabilities of all completion tokens, and the gradients of a weighted sum over all batches."""
    backbone.model.zero_grad()
    values = []
    for batch in batches:
        logprobs = backbone.completion_logprobs(batch, "policy")
        (logprobs * torch.arange(1, logprobs.shape[1] + 1)).sum().backward()
        values += [row[mask] for row, mask in zip(logprobs.detach(), batch.completion_mask, strict=True)]
    return torch.cat(values), {n: p.grad.clone() for n, p in backbone.trainable_parameters()}


def separate(backbone, packs):
    return [backbone.collate([(p, c)], "right") for p, completions in packs for c in completions]


def shared(backbone, packs):
    return [backbone.collate_row(p, completions) for p, completions in packs]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("num_recomputed", [0, 1, 2])
def test_values_and_gradients_are_those_of_separate_rows(family_directory, family, num_recomputed):
    """Float32, several images, however many layers are recomputed in the backward pass."""
    backbone = load(family_directory(family))
    randomize(backbone, "policy", 1)
    expected, expected_gradients = scored(backbone, separate(backbone, rows(backbone)))
    backbone._layers.num_recomputed = num_recomputed
    found, gradients = scored(backbone, shared(backbone, rows(backbone)))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert sum(g.abs().sum() for g in expected_gradients.values()) > 1e-2
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=1e-3)


def test_no_completion_sees_another(qwen):
    """Changing one completion of a row changes nothing for its neighbours."""
    randomize(qwen, "policy", 1)
    prompt = qwen.encode(ask("a", picture(2)))
    with torch.no_grad():
        before = qwen.completion_logprobs(qwen.collate_row(prompt, COMPLETIONS), "policy")
        after = qwen.completion_logprobs(qwen.collate_row(prompt, [*COMPLETIONS[:2], (14,) * 5, (5, 9)]), "policy")
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert not torch.equal(before[2], after[2])


def test_layers_get_no_mask(qwen):
    """Neither the batch's nor one that transformers would make of positions that begin anew."""
    masks = []
    for layer in qwen._base.get_decoder().layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    batch = qwen.collate_row(qwen.encode(ask("a", picture(2))), COMPLETIONS)
    qwen.completion_logprobs(batch, "policy")
    assert masks
    assert all(mask is None for mask in masks)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_attention_equals_the_dense_mask(prompt, completions, key_heads):
    """Any lengths, any grouping of heads, in value and gradient."""
    torch.manual_seed(0)
    length = prompt + sum(completions)
    shapes = [(1, 4, length, 8), (1, key_heads, length, 8), (1, key_heads, length, 8)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:, :prompt] = True
    start = prompt
    for size in completions:
        mask[start : start + size, start : start + size] = True
        start += size
    mask &= torch.ones_like(mask).tril()
    found = attend(query, key, value, Segments(prompt, tuple(completions)), 0.0, 0.4)
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.4, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape)
    inputs = (query, key, value)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), inputs))


def test_eager_attention_shares_no_rows(family_directory):
    """It would add a boolean mask to its scores; padded batches, whose masks transformers makes, agree with sdpa."""
    directory = family_directory("qwen3_vl")
    eager = Backbone.load(model_config(directory, attention="eager"), LoraConfig(rank=4, alpha=8))
    plain = load(directory)
    assert not eager.shares_prompts
    assert not eager.attends_by_mask
    values = []
    for backbone in (eager, plain):
        sequences = [(p, c) for p, completions in rows(backbone) for c in completions]
        with torch.no_grad():
            values.append(backbone.completion_logprobs(backbone.collate(sequences, "left"), "policy"))
    torch.testing.assert_close(*values, atol=2e-5, rtol=0)
