"""Log-probabilities under a frozen output layer: the naive formula's values and gradients, without its memory."""

import pytest
import torch
from loop_factory import rollout, tiny_backbone

from trinity_vlm.backbone.logprobs import frozen_head_logprobs, token_logprobs

BANNED = torch.tensor([0, 3, 19])


def naive(hidden, ids, weight, bias):
    logits = torch.nn.functional.linear(hidden, weight, bias).float().index_fill(1, BANNED, float("-inf"))
    return logits.log_softmax(1).gather(1, ids[:, None])[:, 0]


def inputs(dtype=torch.float32, rows=7):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(rows, 8), torch.randn(20, 8), torch.randn(20)
    ids = torch.tensor([1, 2, 4, 18, 2, 9, 11])[:rows]
    return hidden.to(dtype).requires_grad_(), ids, weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equal_to_the_naive_formula(rows_per_chunk, with_bias):
    """In float32, whatever the chunks; the weights of the tokens' losses differ and one is zero."""
    hidden, ids, weight, bias = inputs()
    bias = bias if with_bias else None
    found = frozen_head_logprobs(hidden, ids, weight, bias, BANNED, chunk_bytes=rows_per_chunk * 20 * 4)
    expected = naive(hidden, ids, weight, bias)
    torch.testing.assert_close(found, expected)
    grads = torch.linspace(-1, 1, 7)
    torch.testing.assert_close(*(torch.autograd.grad(v, hidden, grads)[0] for v in (found, expected)))


def test_a_banned_token_has_no_probability_and_pulls_at_nothing():
    """-inf in value; its constant logit gives no gradient, the normalizer does, as in the naive formula."""
    hidden, ids, weight, bias = inputs()
    ids[2] = 3
    found, expected = frozen_head_logprobs(hidden, ids, weight, bias, BANNED), naive(hidden, ids, weight, bias)
    assert found[2] == float("-inf")
    expected_gradient = torch.autograd.grad(-torch.where(ids == 3, 0, expected).sum(), hidden)[0]
    gradient = torch.autograd.grad(-torch.where(ids == 3, 0, found).sum(), hidden)[0]
    torch.testing.assert_close(gradient, expected_gradient)
    alone = frozen_head_logprobs(hidden[2:3], ids[2:3], weight, bias, BANNED)
    probabilities = torch.nn.functional.linear(hidden[2], weight, bias).index_fill(0, BANNED, -torch.inf).softmax(0)
    torch.testing.assert_close(torch.autograd.grad(alone.sum(), hidden)[0][2], -probabilities @ weight)


def test_bfloat16_gives_float32_values_and_bfloat16_gradients():
    """Logits in the model's dtype, the softmax in float32: as the naive formula, up to bfloat16 rounding."""
    hidden, ids, weight, bias = inputs(torch.bfloat16)
    found, expected = frozen_head_logprobs(hidden, ids, weight, bias, BANNED), naive(hidden, ids, weight, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    gradient, expected_gradient = (torch.autograd.grad(v.sum(), hidden)[0] for v in (found, expected))
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected_gradient, atol=0.02, rtol=0.02)


def test_no_tokens():
    """An empty batch has empty values and still a gradient."""
    hidden, ids, weight, bias = inputs(rows=0)
    found = frozen_head_logprobs(hidden, ids, weight, bias, BANNED)
    assert found.shape == (0,)
    assert torch.autograd.grad(found.sum(), hidden)[0].shape == (0, 8)


def test_the_head_tied_to_the_embeddings_is_frozen_in_adapter_mode_only():
    """The embedded model ties them. With an adapter both paths give the same gradients; the weight gets none."""
    backbone = tiny_backbone()
    head = backbone._base.get_output_embeddings()
    assert head.weight is backbone._base.get_input_embeddings().weight
    assert not head.weight.requires_grad
    batch = backbone.collate_row(backbone.encode(rollout(backbone, 0, 1.0).prompt), [(60, 61, 62), (70,)])
    results = []
    for fused in (True, False):
        if not fused:
            backbone._token_logprobs = lambda h, i: token_logprobs(h, i, backbone.logits, backbone.num_logits)
        backbone.model.zero_grad()
        values = backbone.completion_logprobs(batch, "policy")
        values.sum().backward()
        results.append((values.detach(), [p.grad.clone() for _, p in backbone.trainable_parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0])
    for fused_gradient, gradient in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(fused_gradient, gradient, atol=1e-5, rtol=1e-4)
    assert head.weight.grad is None
