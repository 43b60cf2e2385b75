"""The least time that a step's generation and update could take on a GPU: memory traffic and arithmetic.

Decoding is bound by memory. A decode step reads the decoder's and the output layer's weights once, for all sequences
in flight, and each sequence's keys and values:

    seconds = (steps * weight_bytes + sum over samples of tokens * (prompt + tokens / 2) * kv_bytes) / bandwidth

``steps``: as many as were needed with the requests that were in flight (each sample's tokens spread evenly from its
start to its end), or at least the longest chain of calls of one image (all else beside it). Adapters (1 % of the
weights) are not counted.

Prefill and update are bound by arithmetic. P: parameters of the decoder's layers, H: of the output layer, d: width of
the queries, L: layers.

    prefill FLOPs = 2 P n + 2 L d n^2     n: prompt tokens that no earlier prompt of the same adapter begins with
                  + 2 V per image patch   V: parameters of the vision tower, once per image
    update FLOPs  = 4 P n + 12 L d a      n: tokens of the retained rollouts, each group's prompt once; forward, and
                  + 4 H t                 backward through frozen weights (half of training's backward); a: pairs of
                                          tokens that attend; t: completion tokens

Parts are added up. Where memory-bound and arithmetic-bound work overlap (a prefill beside others' decoding, backward
passes beside generation), the larger of the two sums is the bound.

Recomputed activations are work of one implementation and not counted. A trainer that runs the prompt with every rollout
has a bound of its own (``prompts_once=False``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from _recorded import Sample

from trinity_vlm.types import CallType, Role, Rollout

BLOCK = 16
BYTES = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes and FLOPs per second that can be reached: H200, HBM3e and bfloat16."""

    bandwidth: float = 4.3e12
    flops: float = 790e12


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of the parts of a Qwen3-VL, and bytes of keys and values per token, all in bfloat16."""

    layers: int
    query_width: int
    decoder: int
    head: int
    vision: int
    kv_bytes: int
    image_token: int
    merge: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers config."""
        text, vision = config.text_config, config.vision_config
        queries = text.num_attention_heads * text.head_dim
        keys = text.num_key_value_heads * text.head_dim
        attention = text.hidden_size * (2 * queries + 2 * keys)
        block = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
        return cls(
            layers=text.num_hidden_layers,
            query_width=queries,
            decoder=text.num_hidden_layers * (attention + 3 * text.hidden_size * text.intermediate_size),
            head=text.vocab_size * text.hidden_size,
            vision=vision.depth * block,
            kv_bytes=text.num_hidden_layers * 2 * keys * BYTES,
            image_token=config.image_token_id,
            merge=vision.spatial_merge_size**2,
        )


def decode_seconds(samples: Sequence[Sample], steps: float, shape: Shape, machine: Machine) -> float:
    """Weights once per step, keys and values once per token."""
    weights = steps * (shape.decoder + shape.head) * BYTES
    cache = sum(s.tokens * (len(s.prompt_ids) + s.tokens / 2) for s in samples) * shape.kv_bytes
    return (weights + cache) / machine.bandwidth


def steps_in_flight(samples: Sequence[Sample]) -> float:
    """Decode steps behind the samples as they ran: the integral of the mean rate of those in flight."""
    edges = sorted({s.start for s in samples} | {s.end for s in samples})
    rates = [(s.start, s.end, s.tokens / max(s.end - s.start, 1e-9)) for s in samples]
    steps = 0.0
    for left, right in pairwise(edges):
        running = [rate for start, end, rate in rates if start <= left and right <= end]
        steps += (right - left) * sum(running) / len(running) if running else 0.0
    return steps


def longest_chain(samples: Iterable[Sample]) -> int:
    """Tokens that must be generated one after the other for the slowest image; no step can have fewer decode steps."""
    longest: dict[str, dict[CallType, int]] = defaultdict(lambda: defaultdict(int))
    for s in samples:
        longest[s.image][s.call] = max(longest[s.image][s.call], s.tokens)
    return max((_chain(calls) for calls in longest.values()), default=0)


def _chain(calls: dict[CallType, int]) -> int:
    graded = max(
        calls[CallType.EQUIVALENCE] + calls[CallType.DISPUTE], calls[CallType.REASON] + calls[CallType.DISPUTE]
    )
    return calls[CallType.PROPOSE] + calls[CallType.SCREEN] + calls[CallType.SOLVE] + graded


def prefill_flops(samples: Sequence[Sample], shape: Shape) -> float:
    """Prompt tokens that a perfect prefix cache would not have, and each image once."""
    seen: set[int] = set()
    images: dict[str, int] = {}
    flops = 0.0
    for s in samples:
        if s.has_image:
            images[s.image] = sum(token == shape.image_token for token in s.prompt_ids)
        new = BLOCK * _new_blocks(s, shape, seen)
        length = len(s.prompt_ids)
        flops += 2 * shape.decoder * new + 2 * shape.layers * shape.query_width * (length**2 - (length - new) ** 2)
    return flops + sum(2 * shape.vision * tokens * shape.merge for tokens in images.values())


def _new_blocks(sample: Sample, shape: Shape, seen: set[int]) -> int:
    """Blocks of the prompt that no prompt before it, under the same adapter, began with."""
    key: int = hash(sample.adapter)
    new = 0
    for start in range(0, len(sample.prompt_ids), BLOCK):
        block = sample.prompt_ids[start : start + BLOCK]
        key = hash((key, block, sample.image if shape.image_token in block else ""))
        new += key not in seen
        seen.add(key)
    return new


def update_flops(rollouts: Iterable[Rollout], shape: Shape, prompts_once: bool) -> float:
    """Forward and backward of every retained rollout, the base weights frozen, nothing recomputed.

    prompts_once: a group's rollouts share the computation of their prompt
    """
    seen: set[tuple[str, Role]] = set()
    flops = 0.0
    for rollout in rollouts:
        prompt, completion = len(rollout.completion.prompt_token_ids), len(rollout.completion.token_ids)
        group = (rollout.image_uid, rollout.role)
        tokens, pairs = completion, prompt * completion + completion**2 / 2
        if not prompts_once or group not in seen:
            tokens, pairs = tokens + prompt, pairs + prompt**2 / 2
        seen.add(group)
        flops += (
            4 * shape.decoder * tokens + 4 * shape.head * completion + 12 * shape.layers * shape.query_width * pairs
        )
    return flops
