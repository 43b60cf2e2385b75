"""Parity and canary on the in-process engine, whose log-probabilities are the trainer's, and on engines that lie."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tiny_families import ask, picture

from trinity_vlm.engine.parity import (
    Gap,
    completion_gap,
    parity_gaps,
    require_parity,
)
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.errors import TrainingError
from trinity_vlm.types import Completion

PROMPTS = [ask("How many?", picture(1)), ask("What is left?", picture(2)), ask("Say it.")]


class Lying:
    """An engine whose requests are changed by ``twist`` before another one answers them."""

    def __init__(self, engine, twist):
        self._engine, self._twist = engine, twist

    async def generate(self, request):
        return await self._engine.generate(self._twist(request))


def engine_of(backbone):
    return TransformersEngine(backbone, 16, False)


def gaps_of(engine, backbone, prompts=PROMPTS, adapter="policy"):
    return asyncio.run(parity_gaps(engine, backbone, prompts, adapter))


def test_the_trainers_own_engine_has_no_gap(players):
    """Both kinds of prompt are reported, over all of their tokens."""
    for adapter in (None, "policy", "verifier"):
        gaps = gaps_of(engine_of(players), players, adapter=adapter)
        assert set(gaps) == {"image", "text"}
        assert max(gap.maximum for gap in gaps.values()) < 1e-4
        assert gaps["image"].tokens > gaps["text"].tokens > 0
        require_parity(gaps, 1e-4)
    assert set(gaps_of(engine_of(players), players, PROMPTS[2:])) == {"text"}


def test_another_image_shows_in_image_prompts_only(players):
    """The engine sees another picture: the gate names the image path."""

    def twist(request):
        return request if request.prompt.image is None else replace(request, prompt=ask("How many?", picture(7)))

    gaps = gaps_of(Lying(engine_of(players), twist), players)
    assert gaps["image"].mean > 0.01 > gaps["text"].maximum
    with pytest.raises(TrainingError, match=r"image prompts: mean .*; text prompts: .*Likely: the image reaches"):
        require_parity(gaps, 1e-3)


def test_another_adapter_shows_in_both(players):
    """An older version served by mistake: the gate names adapter versions and caches."""
    gaps = gaps_of(Lying(engine_of(players), lambda r: replace(r, adapter="verifier")), players)
    assert min(gap.mean for gap in gaps.values()) > 0.01
    with pytest.raises(TrainingError, match="another adapter version"):
        require_parity(gaps, 1e-3)


def test_the_gate_does_not_let_a_nan_pass():
    """Nor a gap just above the bound; one at the bound passes."""
    require_parity({"text": Gap(0.01, 0.5, 3)}, 0.01)
    for bad in (float("nan"), 0.0101):
        with pytest.raises(TrainingError, match="over 3 tokens"):
            require_parity({"text": Gap(bad, bad, 3), "image": Gap(0.0, 0.0, 3)}, 0.01)


def test_the_gap_of_two_completions():
    """The largest difference of the same tokens; other tokens are infinitely far."""
    one = Completion((), (1, 2), "", "length", (-1.0, -2.0))
    assert completion_gap(one, replace(one, logprobs=(-1.1, -2.5))) == pytest.approx(0.5)
    assert completion_gap(one, replace(one, token_ids=(1, 3))) == float("inf")
