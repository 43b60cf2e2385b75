"""Completions that share a row with their prompt get the log-probabilities and gradients of separate rows."""

import torch
from loop_factory import tiny_backbone

from trinity_vlm.types import POLICY


def sequences(backbone):
    """Two prompts over one picture, three and two completions of unequal length."""
    from loop_factory import rollout

    prompts = [backbone.encode(rollout(backbone, i, 1.0).prompt) for i in range(2)]
    return [(prompts[0], [(60, 61, 62), (70,), (80, 81, 82, 83, 84)]), (prompts[1], [(90, 91), (60, 99, 98, 97)])]


def gradients(backbone, batch):
    backbone.model.zero_grad()
    logprobs = backbone.completion_logprobs(batch, POLICY)
    weights = torch.arange(1, logprobs.numel() + 1).reshape(logprobs.shape) / logprobs.numel()
    (logprobs * weights).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in backbone.trainable_parameters()}


def perturbed_backbone():
    """With B = 0 most gradients are exactly 0; a small random B makes every factor matter."""
    backbone = tiny_backbone()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in backbone.trainable_parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return backbone


def test_a_shared_row_equals_separate_rows():
    backbone = perturbed_backbone()
    packs = sequences(backbone)
    assert backbone.shares_prompts
    separate = backbone.collate([(p, c) for p, completions in packs for c in completions], "right")
    shared = backbone.collate_shared(packs)
    assert shared.input_ids.shape[0] == 2
    expected, expected_gradients = gradients(backbone, separate)
    found, found_gradients = gradients(backbone, shared)
    assert torch.equal(shared.completion_mask, separate.completion_mask)
    assert torch.allclose(found, expected, atol=2e-5)
    for name, gradient in expected_gradients.items():
        assert torch.allclose(found_gradients[name], gradient, atol=1e-4, rtol=1e-3), name


def test_no_completion_sees_another():
    """Changing one completion of a shared row changes nothing for its neighbours."""
    backbone = perturbed_backbone()
    packs = sequences(backbone)
    changed = [(packs[0][0], [(60, 61, 62), (500,), (80, 81, 82, 83, 84)]), packs[1]]
    with torch.no_grad():
        before = backbone.completion_logprobs(backbone.collate_shared(packs), POLICY)
        after = backbone.completion_logprobs(backbone.collate_shared(changed), POLICY)
    assert torch.equal(before[[0, 2, 3, 4]], after[[0, 2, 3, 4]])
    assert not torch.equal(before[1], after[1])
