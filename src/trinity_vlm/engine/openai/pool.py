"""Which server a request goes to, and what happens when one fails. Everything here runs on one event loop.

            request ──least loaded──▶ ready server ──answer──▶ caller
                                          │ failure: the request goes to another server, this one is ejected
                                          ▼
            back-off doubles ◀── ejected ──probe, load the current adapters──▶ ready again

One watcher per server checks its health while it is ready and tries to readmit it while it is not. A request is never
lost: it is answered, or raises after ``max_retries`` servers failed on it or none was usable for ``give_up_after``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trinity_vlm.engine.openai.adapters import SavedAdapter
from trinity_vlm.engine.openai.client import Client, RequestRefused, ServerBusy, ServerFailure
from trinity_vlm.engine_settings import ServersConfig
from trinity_vlm.errors import EngineError

T = TypeVar("T")
Work = Callable[[str], Awaitable[T]]

_MISSES_BEFORE_EJECTION = 2


@dataclass(slots=True, eq=False)
class Server:
    """One server as the pool sees it.

    ready: admitted, with the current adapters; paused_until: busy until then (monotonic seconds)
    failures: ejections and failed probes since its last answer; busies: refusals for load since then
    outages: how often it was ejected; away: ejected and not yet back
    calls: requests in flight; reserved: places taken; loaded: adapters this pool put on it
    refusal: why it can't serve this run whatever its health, None when nothing speaks against it
    """

    root: str
    ready: bool = False
    paused_until: float = 0.0
    failures: int = 0
    busies: int = 0
    outages: int = 0
    away: bool = False
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    reserved: int = 0
    loaded: set[str] = field(default_factory=set)
    refusal: str | None = None
    last_error: str = "not tried yet"
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def usable(self, now: float) -> bool:
        return self.ready and now >= self.paused_until


def backoff(failures: int, base: float, largest: float) -> float:
    """Seconds to wait after the given number of failures in a row: 0, base, 2 base, 4 base ... up to ``largest``."""
    return 0.0 if failures == 0 else min(largest, base * 2.0 ** min(failures - 1, 60))


def least_loaded(servers: Sequence[Server], max_in_flight: int, now: float) -> Server | None:
    """The usable server with the fewest requests, the first of equals; None when all are full, paused or ejected."""
    free = [s for s in servers if s.usable(now) and s.reserved < max_in_flight]
    return min(free, key=lambda s: s.reserved, default=None)


class Pool:
    """The servers of one list. ``key`` names the list in messages.

    counters: resent (requests sent again after a failure), ejections, readmissions, busy (refusals for load)
    """

    def __init__(self, config: ServersConfig, key: str, client: Client) -> None:
        self._config = config
        self._key = key
        self._client = client
        self.servers = [Server(root) for root in config.roots]
        self.counters: Counter[str] = Counter(resent=0, ejections=0, readmissions=0, busy=0)
        self._adapters: Mapping[str, SavedAdapter] = {}
        self._changed = asyncio.Event()
        self._stalled_since: float | None = None
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to admit and watch the servers; on the event loop, once."""
        if not self._watchers:
            self._watchers = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def call(self, work: Work[T]) -> T:
        """Run ``work(root)`` on a server until one answers.

        Raises RequestRefused as ``work`` does, EngineError when too many servers failed or none is left.
        """
        failed: list[str] = []
        while True:
            server = await self._acquire()
            outages = server.outages
            try:
                result = await self._run_on(server, work)
            except ServerBusy as busy:
                self._pause(server, busy)
            except ServerFailure as failure:
                if server.outages == outages:  # not the echo of an outage that is dealt with already
                    self._eject(server, str(failure))
                failed.append(f"{server.root}: {failure}")
                if len(failed) > self._config.max_retries:
                    raise EngineError(self._exhausted(failed)) from None
                self.counters["resent"] += 1
            else:
                server.failures = server.busies = 0
                self._stalled_since = None
                return result
            finally:
                server.reserved -= 1
                self._announce()

    async def publish(self, adapters: Mapping[str, SavedAdapter]) -> None:
        """Make these the adapters of every ready server, and wait until at least one server has them.

        Servers that are away get them before they are readmitted. Raises EngineError when a server refuses one.
        """
        self.start()
        self._adapters = dict(adapters)
        await asyncio.gather(*(self._refresh(server) for server in self.servers if server.ready))
        server = await self._acquire()
        server.reserved -= 1
        self._announce()

    async def retire(self) -> None:
        """Stop watching, and unload what this pool loaded where that is possible."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(self._part_from(server) for server in self.servers if server.ready))

    async def _part_from(self, server: Server) -> None:
        with suppress(ServerFailure, ServerBusy, TimeoutError):
            async with asyncio.timeout(self._config.probe_timeout):
                for name in sorted(server.loaded):
                    await self._client.unload_adapter(server.root, name)

    # Choosing and waiting

    async def _acquire(self) -> Server:
        """Reserve a place at a server; the caller gives it back by ``reserved -= 1``."""
        while True:
            now = time.monotonic()
            server = least_loaded(self.servers, self._config.max_in_flight, now)
            if server is not None:
                server.reserved += 1
                return server
            await _set_within(self._changed, self._patience(now))

    def _patience(self, now: float) -> float | None:
        """Seconds until something changes by itself, None when only others can change it.

        Raises EngineError when waiting is hopeless or has been long enough; never while a server works on a request.
        """
        waits = [server.paused_until - now for server in self.servers if server.ready and server.paused_until > now]
        if not any(server.usable(now) for server in self.servers):
            if all(server.refusal is not None for server in self.servers):
                raise EngineError("; ".join(str(server.refusal) for server in self.servers))
            if self._stalled_since is None:
                self._stalled_since = now
            if not any(server.calls for server in self.servers):
                waits.append(self._stalled_since + self._config.give_up_after - now)
        if min(waits, default=0) < 0:
            raise EngineError(self._given_up())
        return min(waits, default=None)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # One request at one server

    async def _run_on(self, server: Server, work: Work[T]) -> T:
        began = time.monotonic()
        call = asyncio.ensure_future(work(server.root))
        server.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ServerFailure(f"given up on while it ran: {server.last_error}") from None
        finally:
            server.calls.discard(call)
            if time.monotonic() - began > self._config.probe_timeout:  # it was worked on: no refusal takes that long
                self._stalled_since = None

    def _pause(self, server: Server, busy: ServerBusy) -> None:
        """Wait as long as asked for, and longer after every refusal: a server may ask for no time at all."""
        now = time.monotonic()
        server.busies += now >= server.paused_until  # requests refused together count as one
        server.last_error = str(busy)
        self.counters["busy"] += 1
        wait = max(busy.retry_after or 0.0, backoff(server.busies, self._config.backoff, self._config.backoff_max))
        server.paused_until = max(server.paused_until, now + wait)

    def _eject(self, server: Server, reason: str) -> None:
        server.last_error = reason
        if server.ready:
            server.ready, server.away = False, True
            server.outages += 1
            server.failures += 1
            self.counters["ejections"] += 1
            server.woken.set()

    # Watching and admitting

    async def _watch(self, server: Server) -> None:
        misses = 0
        while True:
            try:
                misses = await self._attend(server, misses)
            except Exception as error:  # whatever a server made go wrong: it is tried again, and named when given up
                server.last_error = self._client.clean(f"{type(error).__name__}: {error}")
                server.failures += 1

    async def _attend(self, server: Server, misses: int) -> int:
        """Try once to admit the server, or check its health after a while; the checks missed in a row."""
        if not server.ready:
            await asyncio.sleep(backoff(server.failures, self._config.backoff, self._config.backoff_max))
            await self._admit(server)
            return 0
        if await _set_within(server.woken, self._config.probe_every):
            return misses
        try:
            await self._client.check_health(server.root)
        except (ServerFailure, ServerBusy, RequestRefused) as error:
            if misses + 1 == _MISSES_BEFORE_EJECTION:
                self._eject(server, f"health check: {error}")
                for call in list(server.calls):
                    call.cancel()
            return misses + 1
        return 0

    async def _admit(self, server: Server) -> None:
        try:
            await self._client.check_health(server.root)
            await self._prepare(server)
        except RequestRefused as refusal:
            server.refusal = f"{server.root}: {refusal}"
            server.failures += 1
        except (ServerFailure, ServerBusy) as error:
            server.refusal = None
            server.last_error = str(error)
            server.failures += 1
        else:
            self.counters["readmissions"] += server.away
            server.refusal = None
            server.ready, server.away = True, False
            server.woken.clear()
            self._stalled_since = None
        self._announce()

    async def _refresh(self, server: Server) -> None:
        try:
            await self._prepare(server)
        except (ServerFailure, ServerBusy) as error:
            self._eject(server, str(error))
        except RequestRefused as refusal:
            raise EngineError(f"{server.root}: {refusal}") from None

    async def _prepare(self, server: Server) -> None:
        """See that the server has the model and the current adapters, and no older ones of this pool."""
        async with server.preparing:
            wanted: Mapping[str, SavedAdapter] | None = None
            while wanted is not self._adapters:
                wanted = self._adapters
                listed = await self._client.models(server.root)
                if self._config.model not in listed:
                    raise RequestRefused(missing_model(self._config.model, listed, self._key), 404)
                for saved in wanted.values():
                    await self._load(server, saved, listed)
                for name in server.loaded - {saved.served_name for saved in wanted.values()}:
                    await self._client.unload_adapter(server.root, name)
                    server.loaded.discard(name)

    async def _load(self, server: Server, saved: SavedAdapter, listed: Mapping[str, Mapping[str, object]]) -> None:
        """Load an adapter unless the server has it: by name and content it may come from another worker of the run.

        One whose directory is gone was left by a run that ended; vLLM would die of a request for it.
        """
        name = saved.served_name
        if name in listed:
            root = listed[name].get("root")
            if not isinstance(root, str) or Path(root).is_dir():
                return
            await self._client.unload_adapter(server.root, name)
        await self._client.load_adapter(server.root, name, saved.path)
        server.loaded.add(name)

    # Messages

    def _exhausted(self, failed: Sequence[str]) -> str:
        return (
            f"{self._key}: {len(failed)} attempts at one request failed ({self._key}.max_retries="
            f"{self._config.max_retries}): {'; '.join(failed)}. If every server fails on it, look for the reason in "
            "their logs; the run goes on from its last checkpoint with `trinity-vlm resume`"
        )

    def _given_up(self) -> str:
        states = "; ".join(
            f"{s.root}: {s.refusal or s.last_error} ({s.failures} failures in a row)" for s in self.servers
        )
        return (
            f"{self._key}: no server was usable for {self._config.give_up_after:g} s ({self._key}.give_up_after). "
            f"{states}. Start the servers again; the run goes on from its last checkpoint with `trinity-vlm resume`"
        )


def missing_model(model: str, listed: Mapping[str, object], key: str) -> str:
    """What to say when a server does not have the configured model."""
    served = ", ".join(sorted(listed)) or "nothing"
    return f"serves {served}, but {key}.model is {model!r}; set it to a served name (vLLM: --served-model-name)"


async def _set_within(event: asyncio.Event, seconds: float | None) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
