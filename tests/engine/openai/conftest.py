"""Servers on loopback and engines over them; everything is closed at the end of a test."""

import asyncio
from contextlib import ExitStack

import pytest
import torch
from openai_server import LoopbackServer, Tokens

from trinity_vlm.engine.openai import OpenAIEngine, ServersConfig
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.types import CallType, Message, Prompt

QUICK = {
    "model": "base",
    "backoff": 0.01,
    "backoff_max": 0.04,
    "probe_every": 0.02,
    "probe_timeout": 10.0,
    "give_up_after": 30.0,
    "timeout": 30.0,
}


class World:
    """What a test builds: servers, and engines over them with quick settings."""

    def __init__(self, stack, folder):
        self._stack = stack
        self._folder = folder

    def server(self, *arguments, **settings):
        return self._stack.enter_context(LoopbackServer(*arguments, **settings))

    def config(self, *servers, **settings):
        urls = tuple(s if isinstance(s, str) else s.url for s in servers)
        return ServersConfig(**{**QUICK, "urls": urls, "adapter_dir": str(self._folder), **settings})

    def engine(self, *servers, **settings):
        """Plays as the servers' model is."""
        engine = OpenAIEngine(self.config(*servers, **settings), "roles.verifier_engine")
        self._stack.callback(engine.close)
        return engine

    def policy_engine(self, *servers, **settings):
        """Loads adapters "policy" and "verifier" of alpha 4."""
        engine = OpenAIEngine(self.config(*servers, **settings), "engine.servers", Tokens())
        self._stack.callback(engine.close)
        return engine


@pytest.fixture
def world(tmp_path):
    with ExitStack() as stack:
        yield World(stack, tmp_path)


@pytest.fixture
def ask():
    """Build a request; ``text`` tells them apart."""

    def build(text="hello", **changes):
        settings = {
            "prompt": Prompt((Message("system", "be brief"), Message("user", text))),
            "adapter": None,
            "sampling": Sampling(1.0, 0.95, 20, 50),
            "seed": 11,
            "call": CallType.SCREEN,
            "order_key": (text,),
        }
        return GenerationRequest(**{**settings, **changes})

    return build


@pytest.fixture
def play():
    """Ask an engine many requests at once."""

    def run(engine, requests):
        async def gathered():
            return await asyncio.gather(*map(engine.generate, requests))

        return asyncio.run(gathered())

    return run


@pytest.fixture
def lora():
    """The state of an adapter of one layer whose entries are all ``value``."""

    def build(value, rank=2):
        return {
            "base_model.model.layers.0.q_proj.lora_A.weight": torch.full((rank, 3), float(value)),
            "base_model.model.layers.0.q_proj.lora_B.weight": torch.full((5, rank), float(value)),
        }

    return build
