"""What the in-process engine runs together, and when: live episodes, similar lengths, what the cache holds."""

from __future__ import annotations

import asyncio

from engine_helpers import FREE, GREEDY, engine_of, request, run

from trinity_vlm.engine import transformers_engine
from trinity_vlm.engine.decoding import decode
from trinity_vlm.errors import EngineError


def record_batches(monkeypatch):
    """The sizes and adapters of the batches that run from here on."""
    batches = []

    def recorded(backbone, rows):
        batches.append([(r.seed, len(r.prompt.input_ids)) for r in rows])
        decode(backbone, rows)

    monkeypatch.setattr(transformers_engine, "decode", recorded)
    return batches


def test_a_dispatch_waits_for_every_live_episode(players, monkeypatch):
    """Three episodes of several turns whose requests come from tasks within tasks: each wave runs as one batch."""
    batches = record_batches(monkeypatch)
    engine = engine_of(players)

    async def nested(depth, image):
        if depth == 0:
            return await engine.generate(request(image=image, n=2))
        return await asyncio.create_task(nested(depth - 1, image))

    async def episode(image):
        with engine.episode():
            await asyncio.gather(*(nested(d, image) for d in range(image)))
            (answer,) = await engine.generate(request(image=image, sampling=GREEDY))
            return answer

    async def play():
        return await asyncio.gather(*(episode(i) for i in (1, 2, 3)))

    asyncio.run(play())
    assert [len(b) for b in batches] == [2 * (1 + 2 + 3), 3]


def test_a_slow_episode_is_waited_for(players, monkeypatch):
    """One that is live but has not asked yet holds the dispatch, however long it takes."""
    batches = record_batches(monkeypatch)
    engine = engine_of(players)

    async def episode(image, pause):
        with engine.episode():
            await asyncio.sleep(pause)
            await engine.generate(request(image=image))

    async def play():
        await asyncio.gather(episode(1, 0), episode(2, 0.05))

    asyncio.run(play())
    assert [len(b) for b in batches] == [2]


def test_an_episode_that_leaves_or_fails_does_not_hold_up_the_others(players):
    """One never asks, one raises, one goes on alone."""
    engine = engine_of(players)

    async def silent():
        with engine.episode():
            await asyncio.sleep(0)

    async def failing():
        with engine.episode():
            await engine.generate(request(image=1))
            raise RuntimeError("parsing")

    async def steady():
        with engine.episode():
            return [await engine.generate(request(image=2)) for _ in range(3)]

    async def play():
        return await asyncio.gather(silent(), failing(), steady(), return_exceptions=True)

    nothing, error, results = asyncio.run(play())
    assert nothing is None
    assert isinstance(error, RuntimeError)
    assert len(results) == 3


def test_a_cancelled_episode_is_forgotten(players, monkeypatch):
    """Its request does not run and its place is free."""
    batches = record_batches(monkeypatch)
    engine = engine_of(players)

    async def episode(image):
        with engine.episode():
            return await engine.generate(request(image=image))

    async def hold():
        with engine.episode():
            await asyncio.sleep(0.05)
            return await engine.generate(request(image=3))

    async def play():
        doomed = asyncio.create_task(episode(1))
        kept, late = asyncio.create_task(episode(2)), asyncio.create_task(hold())
        await asyncio.sleep(0)
        doomed.cancel()
        return await asyncio.gather(doomed, kept, late, return_exceptions=True)

    doomed, kept, late = asyncio.run(play())
    assert isinstance(doomed, asyncio.CancelledError)
    assert len(kept) == len(late) == 1
    assert [len(b) for b in batches] == [2]


def test_a_loop_that_stopped_mid_way_does_not_block_the_next_one(players):
    """The flag that a dispatch is being prepared belongs to its event loop."""
    engine = engine_of(players)
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate(request()))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    engine._barrier.waiting.clear()
    assert len(asyncio.run(asyncio.wait_for(engine.generate(request()), 30))) == 1
    assert not task.done()


def test_requests_outside_episodes_run_when_the_loop_settles(players, monkeypatch):
    """Evaluation: a gather of many requests is one batch."""
    batches = record_batches(monkeypatch)
    run(engine_of(players), *(request(image=i % 3, seed=i) for i in range(10)))
    assert [len(b) for b in batches] == [10]


def test_batches_are_ordered_by_key_and_homogeneous_in_length(players, monkeypatch):
    """Whatever order requests arrive in, the same rows run together; long prompts run apart from short ones."""
    batches = record_batches(monkeypatch)
    engine = engine_of(players, 4)
    requests = [request("x" * (7 * k % 5), 1, seed=k, order_key=("a", k)) for k in range(6)]
    requests += [request("y" * 120, 1, seed=10, order_key=("a", 10)), request("z", None, seed=11, order_key=(3, "b"))]
    run(engine, *requests)
    first = list(batches)
    batches.clear()
    run(engine, *reversed(requests))
    assert batches == first
    assert all(len(b) <= 4 for b in first)
    assert all(max(n for _, n in b) <= 2 * min(n for _, n in b) for b in first)


def test_a_failed_pass_reaches_every_waiting_episode_and_the_next_one_works(players, monkeypatch):
    """Nobody is left waiting; the engine stays usable."""
    engine = engine_of(players)

    async def episode(image):
        with engine.episode():
            return await engine.generate(request(image=image))

    async def play():
        return await asyncio.gather(*(episode(i) for i in (1, 2, 3)), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(transformers_engine, "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        results = asyncio.run(play())
    assert all(isinstance(r, EngineError) and "out of memory" in str(r) for r in results)
    assert all(len(r) == 1 for r in asyncio.run(play()))


def test_a_cache_budget_makes_batches_smaller(players, monkeypatch):
    """On a GPU, prompts plus budgets of a batch stay within the memory set aside; one row always runs."""
    batches = record_batches(monkeypatch)
    engine = engine_of(players)
    length = len(players.encode(request().prompt).input_ids)
    engine._cache_tokens = 3 * (length + 24)
    run(engine, request(n=7))
    engine._cache_tokens = 1
    run(engine, request(n=2))
    assert [len(b) for b in batches] == [3, 3, 1, 1, 1]


def test_a_cache_budget_counts_the_padding_of_split_prompts(players, monkeypatch):
    """By hand: four prompts of L tokens share all but their last E + 1. A fifth of L tokens with another picture is
    split before its last token, so that a row takes L - 1 and E + 1 columns: five rows of L + E do not fit a cache for
    five of L, though no prompt is longer than L. The fifth begins another batch with its like."""
    batches = record_batches(monkeypatch)
    texts = ["?" * 39 + end for end in "abcd"], [start + "?" * 39 for start in "abcd"]
    prompts = [request(text, image) for image, kind in enumerate(texts) for text in kind]
    (length,) = {len(players.encode(r.prompt).input_ids) for r in prompts}
    engine = engine_of(players)
    engine._cache_tokens = 5 * (length + FREE.max_tokens)
    run(engine, *prompts)
    assert [len(b) for b in batches] == [4, 4]
