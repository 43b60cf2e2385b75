"""An engine's own event loop: who may wait for it, and what those get who wait when it ends."""

import asyncio
import threading

import pytest

from trinity_vlm.engine.background import BackgroundLoop
from trinity_vlm.errors import EngineError


@pytest.fixture
def background():
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


def test_work_runs_on_one_loop_whoever_asks_and_a_cancelled_wait_cancels_it(background):
    """Two asyncio.run calls meet the same loop."""
    events = []

    async def where():
        return id(asyncio.get_running_loop())

    async def sleeper():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    async def impatient():
        await asyncio.wait_for(background.run(sleeper()), 0.05)

    assert asyncio.run(background.run(where())) == asyncio.run(background.run(where())) == background.call(where())
    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    background.close()
    assert events == ["cancelled"]


def test_who_waits_when_the_engine_closes_gets_an_error_of_the_engine(background):
    """A CancelledError would tell the waiting task that it was cancelled itself, and end it without a word."""
    begun = threading.Event()

    async def asked():
        begun.set()
        await asyncio.sleep(60)

    async def close_while_waiting():
        waiting = asyncio.create_task(background.run(asked()))
        await asyncio.to_thread(begun.wait)
        await asyncio.to_thread(background.close)
        await waiting

    with pytest.raises(EngineError, match="closed while it was asked"):
        asyncio.run(close_while_waiting())


def test_a_blocking_call_that_the_close_ends_gets_the_same_error(background):
    begun, found = threading.Event(), []

    async def asked():
        begun.set()
        await asyncio.sleep(60)

    def ask():
        with pytest.raises(EngineError, match="closed while it was asked"):
            background.call(asked())
        found.append("told")

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(10)
    background.close()
    thread.join(10)
    assert found == ["told"]


def test_nobody_who_asks_while_it_closes_waits_forever():
    """From eight threads, at any moment: each is answered or told."""
    for _ in range(30):
        background, answers = BackgroundLoop("test"), []

        async def answer():
            return 1

        def ask(background=background, answers=answers, answer=answer):
            try:
                while True:
                    background.call(answer())
            except EngineError:
                answers.append("told")

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        background.close()
        for thread in threads:
            thread.join(10)
        assert answers == ["told"] * 8


def test_a_waiting_task_that_is_cancelled_itself_stays_cancelled(background):
    """Also when the engine closes at the same moment."""

    async def cancelled_and_closed():
        waiting = asyncio.create_task(background.run(asyncio.sleep(60)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.to_thread(background.close)
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled_and_closed())


def test_a_closed_loop_takes_no_work(background):
    background.close()
    background.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(background.run(asyncio.sleep(0)))
    with pytest.raises(EngineError, match="closed"):
        background.call(asyncio.sleep(0))


def test_the_thread_ends_even_when_the_last_work_fails():
    background = BackgroundLoop("test")

    async def failing():
        raise OSError("no such server")

    with pytest.raises(OSError, match="no such server"):
        background.close(failing)
    assert not background._thread.is_alive()
    background.close()


def test_the_loop_knows_its_own_thread(background):
    async def here():
        return background.is_here

    assert background.call(here()) is True
    assert background.is_here is False
