"""The vLLM engine on vLLM's CPU build and the embedded model: same tokens as the in-process engine, versions that never
mix, schemas, bans, seeds, aborts, episodes. One engine serves the whole file; the last test kills it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from adapters_factory import adapted_backbone, random_state
from loop_factory import picture

from trinity_vlm.assembly import make_cast
from trinity_vlm.config import load_config
from trinity_vlm.engine.parity import parity_gaps, require_parity
from trinity_vlm.engine.protocol import Engine, GenerationRequest, Sampling
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.engine.vllm.engine import VllmEngine
from trinity_vlm.engine_settings import VllmConfig
from trinity_vlm.episode import play_episode
from trinity_vlm.errors import EngineError
from trinity_vlm.types import POLICY, VERIFIER, CallType, ImageRecord, Message, Prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = load_config("tiny", ["model.dtype=float32"])
GREEDY = Sampling(0.0, 1.0, 0, 32)
FREE = Sampling(1.0, 0.95, 20, 32)
HOT = Sampling(2.0, 1.0, 0, 64)
PARITY = 5e-4
CACHE_GIB = 0.004
SCHEMA = {
    "type": "object",
    "properties": {
        "fact_q": {"enum": [0, 1]},
        "difficulty": {"enum": [0.1, 0.4, 0.7, 1.0]},
        "justification": {"type": "string", "maxLength": 60},
    },
    "required": ["fact_q", "difficulty", "justification"],
}


@pytest.fixture(scope="module")
def backbone():
    return adapted_backbone(CONFIG)


@pytest.fixture(scope="module")
def engine(backbone):
    engine = VllmEngine(backbone, CONFIG.model, VllmConfig(mm_cache_gib=CACHE_GIB, kv_cache_gib=0.5), 64)
    yield engine
    engine.close()


@pytest.fixture
def versions(backbone, engine):
    """Loads numbered policies; the backbone's own comes back afterwards."""
    yield lambda seed: engine.load_adapter(POLICY, seed, random_state(backbone, POLICY, seed))
    engine.load_adapter(POLICY, 0, backbone.adapter_state(POLICY))


def prompt(text="How many red circles are there?", image=1):
    record = None if image is None else picture(image)
    return Prompt((Message("system", "Look closely."), Message("user", text, record)), "<think>\n")


def request(text="How many red circles are there?", image=1, adapter=POLICY, seed=3, **changes):
    settings = {"sampling": FREE, "call": CallType.SOLVE, "order_key": (f"picture-{image}", 0)} | changes
    return GenerationRequest(prompt=prompt(text, image), adapter=adapter, seed=seed, **settings)


def run(engine, *requests):
    """All requests at once."""

    async def gather():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(gather())


def assert_same(found, expected):
    """Equal completions; where a near tie parts them, log-probabilities agree up to there."""
    assert found.prompt_token_ids == expected.prompt_token_ids
    pairs = list(zip(found.token_ids, expected.token_ids, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert found.logprobs[:same] == pytest.approx(expected.logprobs[:same], abs=PARITY)
    if same < len(pairs):
        assert found.logprobs[same] == pytest.approx(expected.logprobs[same], abs=PARITY)
    else:
        assert (found.token_ids, found.text, found.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )


def trainers_answers(backbone, seed, requests):
    """What the in-process engine says under the numbered policy."""
    before = backbone.adapter_state(POLICY)
    backbone.load_adapter_state(POLICY, random_state(backbone, POLICY, seed))
    answers = run(TransformersEngine(backbone, 64, False), *requests)
    backbone.load_adapter_state(POLICY, before)
    return answers


def unfinished(engine):
    return engine._llm.output_processor.get_num_unfinished_requests()


def test_greedy_completions_are_those_of_the_transformers_engine(backbone, engine):
    """Prompt ids, tokens, text and end: with and without an image, for the base and both adapters of unequal rank."""
    assert isinstance(engine, Engine)
    requests = [
        request(text, image, adapter, sampling=GREEDY, want_logprobs=True)
        for text in ("How many red circles are there?", "Which one is the largest?")
        for image in (1, 2, None)
        for adapter in (None, POLICY, VERIFIER)
    ]
    expected = run(TransformersEngine(backbone, 64, False), *requests)
    for (mine,), (theirs,) in zip(run(engine, *requests), expected, strict=True):
        assert_same(mine, theirs)
    assert len({c.token_ids for (c,) in expected}) > 12


@pytest.mark.parametrize("size", [(100, 60), (300, 200), (129, 128)])
def test_images_of_any_size_are_expanded_as_the_trainer_expands_them(backbone, engine, size):
    """The pixel limits reach vLLM's processor; otherwise the engine would refuse."""
    odd = ImageRecord("odd", picture(1).pixels.resize(size))
    asked = replace(request(sampling=GREEDY), prompt=Prompt((Message("user", "How many?", odd),)))
    ((found,),) = run(engine, asked)
    assert found.prompt_token_ids == backbone.encode(asked.prompt).input_ids


def test_sampled_logprobs_are_the_trainers(backbone, engine):
    """Before temperature and filters, normalised without the banned ids: with and without an image, every adapter."""
    prompts = [prompt(image=i) for i in (1, 2, None, None)]
    for adapter in (None, POLICY, VERIFIER):
        gaps = asyncio.run(parity_gaps(engine, backbone, prompts, adapter))
        assert set(gaps) == {"image", "text"}
        require_parity(gaps, 1e-4)
        assert max(gap.maximum for gap in gaps.values()) <= PARITY
    hot = replace(request(sampling=Sampling(1.7, 0.9, 30, 32), n=4, want_logprobs=True))
    (completions,) = run(engine, hot)
    encoded = backbone.encode(hot.prompt)
    with torch.no_grad():
        batch = backbone.collate([(encoded, c.token_ids) for c in completions], "right")
        expected = backbone.completion_logprobs(batch, POLICY)
    for row, found in enumerate(completions):
        assert found.logprobs == pytest.approx(expected[row, : len(found.logprobs)].tolist(), abs=PARITY)


def test_adapters_beside_each_other_and_beside_the_base_equal_single_runs(engine):
    """Rows without an adapter get none, wherever they stand in the batch."""
    adapters = (POLICY, None, VERIFIER, None, POLICY, VERIFIER, None)
    requests = [
        request(image=i % 3, adapter=a, sampling=GREEDY, want_logprobs=True) for i, a in enumerate(adapters * 2)
    ]
    mixed = run(engine, *requests)
    for asked, (found,) in zip(requests, mixed, strict=True):
        ((alone,),) = run(engine, asked)
        assert_same(found, alone)


def test_samples_follow_their_seeds(engine):
    """n = 3 are the first three of n = 5, alone or among others, and so is each alone; another seed gives others."""
    ((*three,), (*five,)) = run(engine, request(n=3), request(n=5))
    assert [c.token_ids for (c,) in run(engine, *(request(first=i) for i in range(5)))] == [c.token_ids for c in five]
    assert [c.token_ids for c in three] == [c.token_ids for c in five[:3]]
    assert [c.token_ids for c in run(engine, request(n=3))[0]] == [c.token_ids for c in three]
    assert len({c.token_ids for c in five}) == 5
    assert run(engine, request(seed=4))[0][0].token_ids != three[0].token_ids


def test_a_new_version_is_never_answered_from_the_old_ones_cache(backbone, engine, versions):
    """The same prompt before and after a swap, and after swapping back."""
    asked = request(sampling=GREEDY, want_logprobs=True)
    answers = []
    for seed in (11, 12, 11):
        versions(seed)
        ((expected,),) = trainers_answers(backbone, seed, [asked])
        for _ in range(2):
            ((found,),) = run(engine, asked)
            assert_same(found, expected)
        answers.append(found.token_ids)
    assert answers[0] == answers[2] != answers[1]


def test_swaps_under_load_never_mix_versions(backbone, engine, versions):
    """1,000 requests over five swaps, new ones sent while old ones run: each is answered by the version it met."""
    count, seeds = 200, (21, 22, 23, 24, 22)
    few = replace(GREEDY, max_tokens=8)
    asked = [
        request(f"Question {i}: how many?", i % 4 or None, seed=i, sampling=few, want_logprobs=True)
        for i in range(count)
    ]
    alone = {s: [completions[0] for completions in trainers_answers(backbone, s, asked)] for s in set(seeds)}
    assert len({tuple(c.token_ids for c in answers) for answers in alone.values()}) == len(set(seeds))

    async def swap():
        tasks, in_flight = [], []
        for seed in seeds:
            in_flight.append(sum(not task.done() for task in tasks))
            versions(seed)
            tasks += [asyncio.create_task(engine.generate(r)) for r in asked]
            await asyncio.sleep(0.2)
        return [completions[0] for completions in await asyncio.gather(*tasks)], in_flight

    found, in_flight = asyncio.run(swap())
    assert max(in_flight) >= count // 2
    expected = [answer for seed in seeds for answer in alone[seed]]
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)


def test_old_versions_leave_nothing_behind(engine, versions):
    """After swaps: one directory and one loaded adapter per name."""
    for seed in (31, 32, 33):
        versions(seed)
    assert len(engine._background.call(engine._llm.list_loras())) == 2
    assert len([path for path in engine._folder.path.iterdir() if path.is_dir()]) == 2


def test_verdicts_parse_by_construction(engine):
    """Every verdict that ends is an object of the schema, whatever the prompt and the temperature."""
    requests = [
        request(
            f"Judge {i}.", i % 3 or None, VERIFIER, i, n=2, json_schema=SCHEMA, sampling=replace(HOT, max_tokens=160)
        )
        for i in range(6)
    ]
    for completions in run(engine, *requests):
        for completion in completions:
            assert completion.finish_reason == "stop"
            verdict = json.loads(completion.text)
            assert list(verdict) == list(SCHEMA["properties"])
            assert verdict["difficulty"] in (0.1, 0.4, 0.7, 1.0)


def test_a_schema_after_a_marker_leaves_the_thinking_free(backbone, engine):
    """Up to the marker the tokens are those of a free completion; behind it stands the verdict."""
    asked = [
        request(image=i % 3 or None, adapter=None, seed=i, sampling=replace(FREE, max_tokens=200)) for i in range(8)
    ]
    free = run(engine, *asked)
    bound = run(engine, *(replace(r, json_schema=SCHEMA, schema_after="</think>") for r in asked))
    closed = 0
    for (before,), (after,) in zip(free, bound, strict=True):
        thought, marker, _ = before.text.partition("</think>")
        if not marker:
            assert after == before
            continue
        closed += 1
        assert after.text.startswith(thought + marker)
        assert after.finish_reason == "stop"
        assert json.loads(after.text.partition("</think>")[2])["fact_q"] in (0, 1)
        assert after.token_ids[-1] in backbone.eos_ids
        assert backbone.decode(after.token_ids) == after.text
    assert closed >= 2


def test_placeholders_are_never_sampled(backbone, engine):
    """Thousands of tokens at the highest temperature hold none, and none has a share in the log-probabilities."""
    requests = [
        request(image=i % 3 or None, adapter=a, seed=i, n=4, sampling=HOT) for i in range(8) for a in (None, POLICY)
    ]
    tokens = [t for completions in run(engine, *requests) for c in completions for t in c.token_ids]
    assert len(tokens) > 2000
    assert not set(tokens) & backbone.placeholder_ids


def test_more_prompt_tokens_than_one_step_takes(engine):
    """Seeded samples of long prompts that arrive together: on a CPU vLLM dies of a seeded prompt in two pieces."""
    asked = [request(f"{i}: " + "word " * 90, None, seed=i, sampling=replace(FREE, max_tokens=2)) for i in range(60)]
    assert sum(len(c.prompt_token_ids) for (c,) in run(engine, *asked)) > 2 * 2048


def test_budgets_and_contexts(backbone, engine):
    """Exactly the budget or an end id; a prompt that fills the context gives empty completions."""
    (completions,) = run(engine, request(n=8, sampling=replace(HOT, max_tokens=7)))
    for completion in completions:
        ended = completion.token_ids[-1] in backbone.eos_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 7
    (empty, again) = run(engine, request("word " * 700, n=2, want_logprobs=True))[0]
    assert empty == again
    assert (empty.token_ids, empty.text, empty.finish_reason, empty.logprobs) == ((), "", "length", ())
    assert len(empty.prompt_token_ids) > backbone.context


def test_a_cancelled_request_is_aborted(engine):
    """vLLM stops working on it, and its adapter version is free again."""

    async def impatient():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(request(n=3, sampling=replace(HOT, max_tokens=500))), 0.3)
        for _ in range(100):
            if unfinished(engine) == 0:
                return
            await asyncio.sleep(0.05)

    asyncio.run(impatient())
    assert unfinished(engine) == 0
    assert engine._versions._current[POLICY].users == 0


def test_bad_requests_and_adapters_leave_the_engine_alive(backbone, engine, monkeypatch):
    """Unknown names, wrong keys, an unreadable file, keys of no layer: an error each, and the old version serves on."""
    state = random_state(backbone, POLICY, 41)
    with pytest.raises(EngineError, match="unknown adapter 'nobody'; loaded: policy, verifier"):
        run(engine, request(adapter="nobody"))
    with pytest.raises(EngineError, match="unknown adapter 'nobody'"):
        engine.load_adapter("nobody", 1, state)
    with pytest.raises(EngineError, match="keys are missing, foreign or misshapen"):
        engine.load_adapter(POLICY, 1, {k: v[..., :-1] for k, v in state.items()})
    before = run(engine, request(sampling=GREEDY))[0][0].token_ids
    write = engine._folder.write

    def unreadable(*arguments):
        folder = write(*arguments)
        (folder / "adapter_model.safetensors").write_bytes(b"junk")
        return folder

    def foreign(label, tensors, alpha, dtype):
        return write(label, {k.replace("language_model", "nothing"): v for k, v in tensors.items()}, alpha, dtype)

    for broken, message in ((unreadable, "can't load adapter 'policy' version 1"), (foreign, "changes nothing")):
        monkeypatch.setattr(engine._folder, "write", broken)
        with pytest.raises(EngineError, match=message):
            engine.load_adapter(POLICY, 1, state)
    assert run(engine, request(sampling=GREEDY))[0][0].token_ids == before
    assert len(engine._background.call(engine._llm.list_loras())) == 2


def test_a_prompts_beginning_is_computed_once(engine, versions):
    """vLLM's own count: the second tail of an image finds whole blocks of it cached; a new version finds none."""
    ask = lambda text: run(engine, request(text, 77, sampling=replace(GREEDY, max_tokens=1)))  # noqa: E731
    found = []
    for text, fresh in (("First?", False), ("Second?", False), ("Third?", True)):
        if fresh:
            versions(51)
        before = engine.counters
        ask(text)
        found.append({key: value - before[key] for key, value in engine.counters.items()})
    assert [counts["adapter_loads"] for counts in found] == [0, 0, 0]
    assert [counts["cached_prompt_tokens"] > 0 for counts in found] == [False, True, False]
    assert all(counts["prompt_tokens"] > 20 for counts in found)


def test_the_image_cache_is_bounded(engine):
    """64 distinct images of 0.1 MB each in a cache of 4 MiB: it filled up and let go."""
    run(engine, *(request(image=100 + i, sampling=replace(GREEDY, max_tokens=1)) for i in range(64)))
    cache = engine._llm.renderer.mm_processor_cache._cache
    assert cache.maxsize == pytest.approx(CACHE_GIB * 2**30, rel=1e-6)
    assert 0.8 * cache.maxsize < cache.currsize <= cache.maxsize
    assert len(cache) < 64


def test_a_whole_episode(backbone, engine):
    """With the real roles: prompts and log-probabilities as the trainer needs them, verdicts parsed."""
    cast = make_cast(CONFIG, engine)
    episode = asyncio.run(play_episode(picture(1), 1, cast))
    cast.matcher.close()
    assert len(episode.candidates) == CONFIG.roles.candidates
    for candidate in episode.candidates:
        assert len(candidate.completion.logprobs) == len(candidate.completion.token_ids) > 0
        assert candidate.completion.prompt_token_ids == backbone.encode(candidate.prompt).input_ids
    verdicts = [call for call in episode.calls if call.call is CallType.SCREEN]
    assert all(call.parsed or call.truncated for call in verdicts)


def test_a_dead_vllm_is_an_error_at_once_and_close_is_final(engine):
    """Requests under way and later ones fail with the reason instead of waiting for ever. Kills the engine: last."""
    processes = engine._llm.engine_core.resources.engine_manager.processes

    async def bereaved():
        task = asyncio.create_task(engine.generate(request(n=2, sampling=replace(HOT, max_tokens=500))))
        await asyncio.sleep(0.3)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="EngineDead"):
            await asyncio.wait_for(task, 60)

    asyncio.run(bereaved())
    with pytest.raises(EngineError, match="EngineDead"):
        run(engine, request())
    folder = engine._folder.path
    engine.close()
    assert not folder.exists()
    with pytest.raises(EngineError, match="closed"):
        run(engine, request())
