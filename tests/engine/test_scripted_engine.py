"""The scripted engine: texts in order, made-up ids, truncation marks, records."""

from __future__ import annotations

import asyncio

import pytest

from trinity_vlm.engine.protocol import Engine, GenerationRequest, Sampling
from trinity_vlm.engine.scripted import END_ID, TRUNCATED, ScriptedEngine, fake_token_ids
from trinity_vlm.errors import EngineError
from trinity_vlm.types import CallType, Message, Prompt


def request(call=CallType.SOLVE, n=1, **changes):
    prompt = Prompt((Message("user", "ab"),), "<think>\n")
    return GenerationRequest(prompt, "policy", Sampling(1, 1, 0, 8), 0, call, ("x",), n, **changes)


def ask(engine, *requests):
    async def run():
        with engine.episode():
            return [await engine.generate(r) for r in requests]

    return asyncio.run(run())


def test_it_is_an_engine():
    """The protocol holds."""
    assert isinstance(ScriptedEngine({}), Engine)


def test_texts_per_call_type_are_handed_out_in_order_and_again():
    """Two requests of two share a list of three texts."""
    engine = ScriptedEngine({CallType.SOLVE: ["a", "b", "c"]})
    first, second = ask(engine, request(n=2), request(n=2))
    assert [c.text for c in first + second] == ["a", "b", "c", "a"]
    assert len(engine.requests) == 2


def test_truncation_marks_and_made_up_ids():
    """A marked text is cut off: no end id, finish reason length. Ids never equal the end id."""
    engine = ScriptedEngine(lambda r: ["ab", "cd" + TRUNCATED])
    ((whole, cut),) = ask(engine, request(n=2, want_logprobs=True))
    assert (whole.text, whole.finish_reason, whole.token_ids) == ("ab", "stop", (98, 99, END_ID))
    assert (cut.text, cut.finish_reason, cut.token_ids) == ("cd", "length", (100, 101))
    assert whole.logprobs == (-1.0,) * 3
    assert whole.prompt_token_ids == fake_token_ids("ab<think>\n")
    assert END_ID not in fake_token_ids("\x00a")


def test_missing_and_miscounted_texts_are_errors():
    """A script that doesn't fit the episode is told so."""
    with pytest.raises(EngineError, match="no text for a solve call"):
        ask(ScriptedEngine({CallType.PROPOSE: ["a"]}), request())
    with pytest.raises(EngineError, match="gave 1 texts for a solve call of 2"):
        ask(ScriptedEngine(lambda r: ["a"]), request(n=2))


def test_adapter_loads_are_recorded():
    """Name and version."""
    engine = ScriptedEngine({})
    engine.load_adapter("verifier", 3, {})
    assert engine.loaded == [("verifier", 3)]
