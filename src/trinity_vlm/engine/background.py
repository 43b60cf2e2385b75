"""An event loop in a thread of its own: what an engine keeps running outlives the loops of single steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from trinity_vlm.errors import EngineError

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for callers inside and outside of other event loops, until ``close``.

    ``call`` and ``run`` raise EngineError when ``close`` ends their work, for whoever waits was not cancelled, and
    after it.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._taking = threading.Lock()
        self._closing = False

    @property
    def is_here(self) -> bool:
        """Whether this very code runs on the loop's thread, which ``call`` and ``close`` would wait for forever."""
        return threading.current_thread() is self._thread

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and wait for it, blocking this thread."""
        try:
            return self._take(work).result()
        except CancelledError:
            if self._closing:
                raise _closed_meanwhile() from None
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and await it from another event loop; cancelling the wait cancels the work."""
        try:
            return await asyncio.wrap_future(self._take(work))
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if self._closing and waiting is not None and not waiting.cancelling():
                raise _closed_meanwhile() from None
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what still runs, run ``last``, and end the thread also if that fails; harmless when called twice."""
        with self._taking:
            if self._closing:
                return
            self._closing = True
        try:
            self._submit(_cancel_others()).result()
            if last is not None:
                self._submit(last()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _take(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Nothing comes in behind what ``close`` cancels: it would never be answered."""
        with self._taking:
            if not self._closing:
                return self._submit(work)
        work.close()
        raise EngineError("the engine is closed: nothing can be asked of it any more")

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _closed_meanwhile() -> EngineError:
    return EngineError("the engine was closed while it was asked")


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
