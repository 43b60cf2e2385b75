"""Real vLLM (CPU build) and the trainer's weights: shared ones compute the same, swapped ones equal an adapter.

Both engines here compute with vLLM's weights as they were loaded; its CPU build packs them otherwise.
"""

from __future__ import annotations

import asyncio

import pytest
from adapters_factory import adapted_backbone, random_state
from loop_factory import picture

from trinity_vlm.config import load_config
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.engine.vllm.engine import VllmEngine
from trinity_vlm.engine.vllm.library import PLAIN_WORKER_EXTENSION
from trinity_vlm.engine_settings import VllmConfig
from trinity_vlm.errors import EngineError
from trinity_vlm.types import POLICY, VERIFIER, CallType, Message, Prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = load_config("tiny", ["model.dtype=float32"])
SETTINGS = VllmConfig(mm_cache_gib=0.1, kv_cache_gib=0.25)
GREEDY = Sampling(0.0, 1.0, 0, 32)
PARITY = 5e-4


@pytest.fixture(scope="module")
def backbone():
    return adapted_backbone(CONFIG)


def requests(adapter):
    """With an image and without, greedy, with log-probabilities."""
    return [
        GenerationRequest(
            Prompt((Message("user", text, None if image is None else picture(image)),), "<think>\n"),
            adapter,
            GREEDY,
            3,
            CallType.SOLVE,
            (text, str(image)),
            want_logprobs=True,
        )
        for text in ("How many red circles are there?", "Which one is the largest?")
        for image in (1, 2, None)
    ]


def run(engine, asked):
    async def gather():
        return [completions[0] for completions in await asyncio.gather(*(engine.generate(r) for r in asked))]

    return asyncio.run(gather())


def assert_same(found, expected):
    """Equal up to a near tie, where the log-probabilities agree."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        pairs = list(zip(mine.token_ids, theirs.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        end = same + (same < len(pairs))
        assert mine.logprobs[:end] == pytest.approx(theirs.logprobs[:end], abs=PARITY)
        assert same < len(pairs) or mine.token_ids == theirs.token_ids


def test_the_trainer_computes_with_vllms_weights(backbone):
    """All base weights are found bit for bit; both sides say what they said before, and the trainer still does when
    vLLM is gone."""
    own = TransformersEngine(backbone, 64, False)
    asked = [r for adapter in (None, POLICY, VERIFIER) for r in requests(adapter)]
    expected = run(own, asked)
    engine = VllmEngine(
        backbone, CONFIG.model, SETTINGS, 64, overrides={"worker_extension_cls": PLAIN_WORKER_EXTENSION}
    )
    try:
        assert engine.sharing is None
        report = engine.share_weights()
        assert engine.sharing is report
        assert (report.kept, report.kept_example) == (0, "")
        frozen = [p for n, p in backbone.model.named_parameters() if not p.requires_grad and ".lora_" not in n]
        assert report.shared == sum(p.nbytes for p in frozen) > 8e6
        assert run(own, asked) == expected
        assert_same(run(engine, asked), expected)
    finally:
        engine.close()
    assert run(own, asked) == expected


def test_swapped_weights_answer_as_the_adapters_do(backbone):
    """Verifier, policy, verifier again, and a new policy; an engine that serves no adapters refuses their names."""
    own = TransformersEngine(backbone, 64, False)
    engine = VllmEngine(backbone, CONFIG.model, SETTINGS, 64, adapters=False)
    try:
        assert_same(run(engine, requests(None)), run(own, requests(None)))
        for name in (VERIFIER, POLICY, VERIFIER):
            assert engine.swap_weights(name) > 0
            expected = run(own, requests(name))
            for _ in range(2):
                assert_same(run(engine, requests(None)), expected)
        state = random_state(backbone, POLICY, 7)
        engine.load_adapter(POLICY, 1, state)
        backbone.load_adapter_state(POLICY, state)
        engine.swap_weights(POLICY)
        assert_same(run(engine, requests(None)), run(own, requests(POLICY)))
        with pytest.raises(EngineError, match=r"serves no adapters: swap_weights\('policy'\)"):
            run(engine, requests(POLICY))
        with pytest.raises(EngineError, match="unknown adapter 'nobody'"):
            engine.swap_weights("nobody")

        async def meanwhile():
            task = asyncio.create_task(engine.generate(requests(None)[0]))
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match="in flight"):
                engine.swap_weights(POLICY)
            await task

        asyncio.run(meanwhile())
    finally:
        engine.close()
