"""The sizes that a configuration asks of a model, before any device is looked at; ``memory_plan`` adds them up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trinity_vlm.config import Config
from trinity_vlm.engine_settings import vllm_block_tokens
from trinity_vlm.model_shapes import ModelShape

GIB = 2**30
PROMPT_TEXT_TOKENS = 512
"""Assumed: instructions, question and chat template beside the image."""
TYPICAL = 0.25
"""Assumed: what completions take of their budgets on average, all of a step's in flight together."""


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """GiB of keys and values: what one sequence of ``model.context`` takes, and what all requests of a step take at
    a quarter of their token budgets and at all of them; in whole blocks, as vLLM counts."""

    bytes_per_token: int
    one_sequence: float
    typical: float
    worst: float


@dataclass(frozen=True, slots=True)
class Demand:
    """A configuration and the shape of its model, with what follows from them.

    on_gpu: without one, weights are float32 by default and nothing is captured
    workers: processes that share ``images.per_step``
    """

    config: Config
    shape: ModelShape
    on_gpu: bool = True
    workers: int = 1

    @property
    def dtype(self) -> str:
        dtype = self.config.model.dtype
        return ("bfloat16" if self.on_gpu else "float32") if dtype == "auto" else dtype

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def in_vllm(self) -> bool:
        return self.config.engine.kind == "vllm"

    @property
    def shares_weights(self) -> bool:
        """Whether trainer and vLLM have one copy of the base weights; never where vLLM's are overwritten."""
        engine = self.config.engine
        return self.on_gpu and self.in_vllm and engine.vllm.share_weights and engine.layout == "adapters"

    @property
    def prompt_tokens(self) -> int:
        return self.shape.image_tokens(self.config.model.max_pixels) + PROMPT_TEXT_TOKENS

    @property
    def num_images(self) -> int:
        """This worker's of a step."""
        return math.ceil(self.config.images.per_step / self.workers)

    @property
    def num_sequences(self) -> int:
        """Completions of a step in flight together, if the engine takes so many."""
        roles = self.config.roles
        return min(self.num_images * max(roles.candidates, roles.solutions), self.config.engine.max_batch_sequences)

    @property
    def row_tokens(self) -> int:
        """The longest sequence that is trained on."""
        return min(self.config.model.context, self.prompt_tokens + self.config.roles.policy_tokens)

    @property
    def microbatch_tokens(self) -> int:
        return max(self.row_tokens, self.config.update.tokens_per_microbatch)

    @property
    def verifier_rank(self) -> int | None:
        """None: that of the matrices themselves."""
        kind = self.config.ema.kind
        return {"factored": self.config.ema_rank, "dense": None}.get(kind, self.config.lora.rank)

    def cache_need(self) -> CacheNeed:
        """Keys and values at bfloat16 or float32; prompts of one image are counted once per sequence.

        vLLM gives a sequence whole blocks, and never gives the first block to any (its null block).
        """
        roles, context, block = self.config.roles, self.config.model.context, vllm_block_tokens(self.on_gpu)
        per_token = 2 * self.shape.layers * self.shape.key * self.dtype_bytes

        def gib(num_sequences: int, tokens: int, spare: int = 0) -> float:
            return (num_sequences * math.ceil(tokens / block) + spare) * block * per_token / GIB

        def step(share: float) -> float:
            completion = int(share * max(roles.policy_tokens, roles.verifier_tokens))
            return gib(self.num_sequences, min(context, self.prompt_tokens + completion))

        return CacheNeed(per_token, gib(1, context, spare=1), step(TYPICAL), step(1.0))
