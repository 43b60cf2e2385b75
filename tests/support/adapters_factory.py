"""The embedded model with a policy and a Verifier that visibly differ from the base, for tests of engines."""

import torch

from trinity_vlm.backbone import Backbone
from trinity_vlm.types import POLICY, VERIFIER


def adapted_backbone(config):
    """A policy of rank 8 and a Verifier of rank 16."""
    backbone = Backbone.load(config.model, config.lora.model_copy(update={"rank": 8, "alpha": 16.0}))
    backbone.add_adapter(VERIFIER, 16, 16.0)
    for seed, name in enumerate((POLICY, VERIFIER)):
        backbone.load_adapter_state(name, random_state(backbone, name, seed))
    return backbone


def random_state(backbone, name, seed, scale=0.05):
    """Drawn tensors under the keys of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=generator) * scale for k, v in backbone.adapter_state(name).items()}
