"""The model that plays all roles: loading, prompts to tensors, log-probabilities, adapters. The only user of PEFT.

Prompt --render, encode--> EncodedPrompt --collate with completions--> Batch --completion_logprobs--> [B, T]
"""

from trinity_vlm.backbone.batching import Batch
from trinity_vlm.backbone.core import Backbone
from trinity_vlm.backbone.encoding import EncodedPrompt
from trinity_vlm.backbone.loading import load_processor

__all__ = ["Backbone", "Batch", "EncodedPrompt", "load_processor"]
