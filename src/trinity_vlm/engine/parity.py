"""Does the engine speak with the trainer's model? For any engine that returns log-probabilities.

The log-probabilities of the same tokens are compared, apart for prompts with and without an image: published runs that
collapsed had gaps of 0.17 to 0.30 nat with images against 0.05 without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trinity_vlm.backbone import Backbone
from trinity_vlm.engine.protocol import Engine, GenerationRequest, Sampling
from trinity_vlm.errors import EngineError, TrainingError
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import POLICY, CallType, Completion, Prompt

PARITY_BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 0.05}
"""Largest mean gap, in nats. Measured with images between vLLM and transformers: in float32 2e-6 on a CPU; in bfloat16
on an H200 8e-4 with the embedded model and 0.015 to 0.017 with an 8B one; with keys and values of an older adapter
version in the prefix cache 0.36."""

PARITY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences of token log-probabilities, in nats."""

    mean: float
    maximum: float
    tokens: int


async def parity_gaps(
    engine: Engine, backbone: Backbone, prompts: Sequence[Prompt], adapter: str | None, seed: int = 0
) -> dict[str, Gap]:
    """Sample one completion per prompt and compare its log-probabilities with the trainer's: gaps of the prompts with
    ``"image"`` and of those with ``"text"`` alone, whichever occur.

    The trainer's adapter must hold what the engine was given. Raises EngineError when the engine fails.
    """
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=PARITY_TOKENS)
    requests = [_request(p, adapter, sampling, derive_seed(seed, i), i) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    differences: dict[str, list[float]] = {}
    for prompt, (completion,) in zip(prompts, answers, strict=True):
        kind = "text" if prompt.image is None else "image"
        differences.setdefault(kind, []).extend(_differences(backbone, prompt, completion, adapter))
    return {kind: _gap(values) for kind, values in differences.items() if values}


def require_parity(gaps: Mapping[str, Gap], bound: float, adapter: str | None = POLICY) -> None:
    """Raise TrainingError, naming the adapter and likely causes, when a mean gap exceeds ``bound`` nats."""
    too_far = {kind: gap for kind, gap in gaps.items() if not gap.mean <= bound}
    if not too_far:
        return
    found = "; ".join(
        f"{kind} prompts: mean {gap.mean:.3g}, largest {gap.maximum:.3g} over {gap.tokens} tokens"
        for kind, gap in gaps.items()
    )
    causes = (
        "the image reaches the engine resized, cropped or rounded differently (compare pixel limits and processors)"
        if set(too_far) == {"image"}
        else "another adapter version or scaling is served, the prefix cache kept an older version's keys and values, "
        "or dtype, head precision or attention differ"
    )
    harm = "train on ratios that are wrong from the start" if adapter == POLICY else "follow another model's verdicts"
    raise TrainingError(
        f"engine and trainer disagree on the log-probabilities of the same tokens of the {adapter or 'base model'} "
        f"({found}; at most {bound:g} nat expected): the update would {harm}. Likely: {causes}"
    )


def completion_gap(one: Completion, other: Completion) -> float:
    """Largest absolute difference of the log-probabilities of two completions; infinite when their tokens differ."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    if one.token_ids != other.token_ids:
        return float("inf")
    return max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)


def _request(prompt: Prompt, adapter: str | None, sampling: Sampling, seed: int, index: int) -> GenerationRequest:
    return GenerationRequest(prompt, adapter, sampling, seed, CallType.SOLVE, ("parity", index), want_logprobs=True)


def _differences(backbone: Backbone, prompt: Prompt, completion: Completion, adapter: str | None) -> list[float]:
    if completion.logprobs is None:
        raise EngineError("the engine returned no log-probabilities: the policy can't be compared with the trainer's")
    batch = backbone.collate([(backbone.encode(prompt), completion.token_ids)], "right")
    with torch.no_grad():
        expected = backbone.completion_logprobs(batch, adapter)[0].tolist()
    return [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]


def _gap(values: Sequence[float]) -> Gap:
    return Gap(sum(values) / len(values), max(values), len(values))
