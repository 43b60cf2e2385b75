"""Log-probabilities: equal to the naive computation in value and gradient, in any batch, without padding effects."""

from __future__ import annotations

import pytest
import torch
from tiny_families import ask, load, picture, randomize

from trinity_vlm.backbone.logprobs import token_logprobs


def sequences(backbone):
    """Prompts of different lengths, with and without image, completions of different lengths."""
    return [
        (backbone.encode(ask("How many red circles are there?", picture(1))), [5, 6, 7, 8]),
        (backbone.encode(ask("a", picture(2))), [9]),
        (backbone.encode(ask("text only, and quite a bit longer than the others are: 1 2 3 4 5 6 7 8")), [10, 11]),
    ]


def naive(backbone, prompt, completion):
    """Full logits of one sequence through the model's own head, banned ids removed, log-softmax over all tokens."""
    batch = backbone.collate([(prompt, completion)], "right")
    with backbone.image_inputs(batch.prompts) as images:
        logits = backbone.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            **images,
            **batch.token_inputs,
        ).logits.float()
    logits[..., sorted(backbone.placeholder_ids)] = float("-inf")
    start = len(prompt.input_ids)
    table = logits[0, start - 1 : -1].log_softmax(-1)
    return table.gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_equal_to_the_naive_computation_in_value(any_family):
    """Per sequence, through the model's own forward (its own positions, its own head)."""
    randomize(any_family, "policy", 1)
    with torch.no_grad():
        batch = any_family.collate(sequences(any_family), "right")
        found = any_family.completion_logprobs(batch, "policy")
        for row, (prompt, completion) in enumerate(sequences(any_family)):
            expected = naive(any_family, prompt, completion)
            torch.testing.assert_close(found[row, : len(completion)], expected, atol=1e-5, rtol=0)


def test_equal_to_the_naive_computation_in_gradient(qwen):
    """The chunked head recomputes in the backward pass and gives the same adapter gradients."""
    randomize(qwen, "policy", 1)
    weights = torch.tensor([0.5, -1.0, 2.0, 1.0])
    prompt, completion = sequences(qwen)[0]
    batch = qwen.collate([(prompt, completion)], "right")
    gradients = []
    for logprobs in (qwen.completion_logprobs(batch, "policy")[0], naive(qwen, prompt, completion)):
        qwen.model.zero_grad()
        (logprobs * weights).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in qwen.trainable_parameters()})
    assert sum(g.abs().sum() for g in gradients[0].values()) > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_chunks_bound_the_logits_held_at_once(rows_per_chunk):
    """No call of the head sees more rows than the byte bound allows, in the forward pass or its recomputation."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 20)
    hidden, ids = torch.randn(7, 8, requires_grad=True), torch.randint(0, 20, (7,))
    seen = []

    def logits_of(chunk):
        seen.append(len(chunk))
        return head(chunk).float()

    found = token_logprobs(hidden, ids, logits_of, 20, chunk_bytes=rows_per_chunk * 20 * 4)
    expected = head(hidden).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found.square().sum(), hidden)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), hidden)
    torch.testing.assert_close(grad, expected_grad)
    assert max(seen) <= rows_per_chunk


@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_and_neighbours_change_nothing(any_family, pad):
    """A sequence alone and in a mixed batch, padded on either side, agrees to 1e-5."""
    rows = sequences(any_family)
    with torch.no_grad():
        together = any_family.completion_logprobs(any_family.collate(rows, pad), "policy")
        for i, row in enumerate(rows):
            alone = any_family.completion_logprobs(any_family.collate([row], "right"), "policy")
            torch.testing.assert_close(together[i, : len(row[1])], alone[0], atol=1e-5, rtol=0)


def test_probabilities_sum_to_one_over_what_may_be_sampled(qwen):
    """Banned ids have no mass on this side either: the trainer scores the distribution that was sampled."""
    prompt = qwen.encode(ask("How many?", picture(1)))
    allowed = [i for i in range(qwen.num_logits) if i not in qwen.placeholder_ids]
    with torch.no_grad():
        batch = qwen.collate([(prompt, [i]) for i in allowed], "right")
        total = qwen.completion_logprobs(batch, "policy").exp().sum()
        banned = qwen.completion_logprobs(qwen.collate([(prompt, [min(qwen.placeholder_ids)])], "right"), "policy")
    assert float(total) == pytest.approx(1.0, abs=1e-5)
    assert float(banned) == float("-inf")


def test_empty_completions_beside_others_score_nothing(qwen):
    """A row without completion tokens is legal."""
    prompt = qwen.encode(ask("a"))
    with torch.no_grad():
        logprobs = qwen.completion_logprobs(qwen.collate([(prompt, []), (prompt, [5, 6])], "right"), "policy")
    assert logprobs[0].tolist() == [0, 0]
    assert (logprobs[1] < 0).all()


def test_gradient_checkpointing_changes_nothing(family_directory):
    """Recomputed layers give the same gradients, and are really recomputed."""
    gradients, forwards = [], []
    for enabled in (False, True):
        backbone = load(family_directory("qwen3_vl"))
        randomize(backbone, "policy", 3)
        backbone.set_gradient_checkpointing(enabled)
        layer = backbone.model.get_base_model().model.language_model.layers[0].input_layernorm
        count = []
        layer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        batch = backbone.collate(sequences(backbone), "right")
        backbone.completion_logprobs(batch, "policy").sum().backward()
        gradients.append([p.grad for _, p in backbone.trainable_parameters()])
        forwards.append(len(count))
    assert forwards == [1, 2]
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_bfloat16_backbone_gives_float32_logprobs_and_gradients(family_directory):
    """Float32 adapters over bfloat16 weights."""
    from tiny_families import model_config

    from trinity_vlm.backbone import Backbone
    from trinity_vlm.config import LoraConfig

    config = model_config(family_directory("qwen3_vl"), dtype="bfloat16")
    backbone = Backbone.load(config, LoraConfig(rank=4, alpha=8))
    assert backbone.dtype == torch.bfloat16
    logprobs = backbone.completion_logprobs(backbone.collate(sequences(backbone), "right"), "policy")
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    grads = [p.grad for n, p in backbone.trainable_parameters() if "lora_B" in n]
    assert all(g.dtype == torch.float32 and g.any() for g in grads)
