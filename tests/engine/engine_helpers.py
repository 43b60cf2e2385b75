"""Requests for the in-process engine, and how tests ask it."""

from __future__ import annotations

import asyncio

from tiny_families import ask, picture

from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.types import CallType

GREEDY = Sampling(0.0, 1.0, 0, 24)
FREE = Sampling(1.0, 0.95, 20, 24)
TEXTS = ("How many?", "What is the colour of the largest shape in the upper left corner, if any?", "a")


def request(text="How many?", image=1, adapter="policy", seed=3, **changes):
    settings = {"sampling": FREE, "call": CallType.SOLVE, "order_key": (f"picture-{image}", 0)} | changes
    prompt = ask(text, None if image is None else picture(image), "<think>\n")
    return GenerationRequest(prompt=prompt, adapter=adapter, seed=seed, **settings)


def engine_of(backbone, size=64):
    return TransformersEngine(backbone, size, False)


def run(engine, *requests):
    """All requests at once, from outside any episode."""

    async def gather():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(gather())
