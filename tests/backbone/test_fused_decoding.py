"""Fused decoding is the same function as the adapter, and leaves no trace."""

import torch
from loop_factory import rollout, tiny_backbone

from trinity_vlm.types import POLICY


def test_fused_layers_compute_the_adapter_and_restore_it():
    backbone = tiny_backbone()
    with torch.no_grad():
        for _, parameter in backbone.trainable_parameters():
            parameter.add_(0.05)
    weights = {n: p.detach().clone() for n, p in backbone.model.named_parameters()}
    batch = backbone.collate([(backbone.encode(rollout(backbone, 0, 1.0).prompt), (60, 61, 62))], "right")
    with torch.no_grad(), backbone.use_adapter(POLICY):
        plain = backbone.hidden_states(batch)
        with backbone.fused_for_decoding():
            fused = backbone.hidden_states(batch)
        again = backbone.hidden_states(batch)
    with torch.no_grad(), backbone.use_adapter(None), backbone.fused_for_decoding():
        base = backbone.hidden_states(batch)
    assert not torch.equal(fused, plain)
    assert torch.allclose(fused, plain, atol=1e-4)
    assert torch.equal(again, plain)
    assert not torch.allclose(base, plain, atol=1e-2)
    assert all(torch.equal(weights[n], p) for n, p in backbone.model.named_parameters())
