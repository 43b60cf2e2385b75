"""When waiting requests are served: once every live episode waits, so that what runs together never depends on timing.

episode coroutines --hold--> waiting --every live episode waits, event loop settled--> dispatch
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Protocol, TypeVar

# Passes of the event loop without a new request before a dispatch: siblings of a gather arrive within one or two
# passes of each other, however many there are.
_QUIET_PASSES = 10


class Held(Protocol):
    """A waiting request; ``episode``: the ticket of the coroutine that asked (``Barrier.ticket``)."""

    @property
    def episode(self) -> object | None: ...


Request = TypeVar("Request", bound=Held)
Answer = TypeVar("Answer")


class Barrier(Generic[Request]):
    """Calls ``dispatch``, from the event loop, when every live episode waits; it takes what it serves from ``waiting``.

    closed: while set nothing is dispatched; ``stir`` after opening it again
    """

    def __init__(self, dispatch: Callable[[], None]) -> None:
        self.waiting: list[Request] = []
        self.closed = False
        self._dispatch = dispatch
        self._current: ContextVar[object | None] = ContextVar("episode", default=None)
        self._episodes: list[object] = []
        self._quiet_passes = 0
        self._settling_in: asyncio.AbstractEventLoop | None = None

    @property
    def ticket(self) -> object | None:
        """Of the episode that the calling coroutine belongs to."""
        return self._current.get()

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Held by a coroutine while it may send requests: nothing is dispatched before it waits or leaves."""
        ticket = object()
        self._episodes.append(ticket)
        token = self._current.set(ticket)
        try:
            yield
        finally:
            self._current.reset(token)
            self._episodes.remove(ticket)
            self.stir()

    async def hold(self, request: Request, answer: asyncio.Future[Answer]) -> Answer:
        """Wait for ``answer``; a caller that is cancelled takes its request back."""
        self.waiting.append(request)
        self.stir()
        try:
            return await answer
        finally:
            if request in self.waiting:
                self.waiting.remove(request)

    def stir(self) -> None:
        """Something changed: (re)start counting quiet passes of the event loop."""
        self._quiet_passes = 0
        if self.waiting and not self.closed and self._settling_in is not (loop := asyncio.get_running_loop()):
            self._settling_in = loop
            loop.call_soon(self._settle)

    def _settle(self) -> None:
        waiting_episodes = [request.episode for request in self.waiting]
        if not self.waiting or any(ticket not in waiting_episodes for ticket in self._episodes):
            self._settling_in = None
        elif self._quiet_passes < _QUIET_PASSES:
            self._quiet_passes += 1
            asyncio.get_running_loop().call_soon(self._settle)
        else:
            self._settling_in = None
            self._dispatch()
