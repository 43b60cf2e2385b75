"""An event loop in a thread of its own: what an engine keeps running outlives the loops of single steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from trinity_vlm.errors import EngineError

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for callers inside and outside of other event loops, until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closing = False

    @property
    def is_here(self) -> bool:
        """Whether this very code runs on the loop's thread, which ``call`` and ``close`` would wait for forever."""
        return threading.current_thread() is self._thread

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and wait for it, blocking this thread; raises RuntimeError after ``close``."""
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        return waiting.result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and await it from another event loop; cancelling the wait cancels the work.

        Raises EngineError when ``close`` ends the work, for whoever awaits it was not cancelled, and after ``close``.
        """
        if self._closing:
            work.close()
            raise EngineError("the engine is closed: nothing can be asked of it any more")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if self._closing and waiting is not None and not waiting.cancelling():
                raise EngineError("the engine was closed while it was asked") from None
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what still runs, run ``last`` and end the thread; harmless when called twice."""
        if self._loop.is_closed():
            return
        self._closing = True
        self.call(_cancel_others())
        if last is not None:
            self.call(last())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
