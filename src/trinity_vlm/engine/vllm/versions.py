"""Which version of each adapter vLLM holds, and who still uses it. Lives on the engine's own event loop.

    load version 4 ──▶ checked ──▶ current: new requests use it
                                   version 3: removed when its last request ends

A version is a new name, id and directory: vLLM's prefix cache, its adapter cache and a request under way all tell
versions apart by these, so none ever sees another's weights.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trinity_vlm.errors import EngineError

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One loaded version. ``handle`` is vLLM's LoRARequest, ``users`` the number of requests under way."""

    name: str
    handle: Any
    folder: Path
    users: int = 0


class AdapterVersions:
    """The versions that an AsyncLLM ``llm`` holds."""

    def __init__(self, llm: Any, make_handle: Callable[..., Any]) -> None:
        self._llm = llm
        self._make_handle = make_handle
        self._ids = count(1)
        self._current: dict[str, AdapterVersion] = {}
        self._leaving: set[AdapterVersion] = set()
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Any]:
        """vLLM's handle of the current version (None for the base model), held until the block ends."""
        if name is None:
            yield None
            return
        if name not in self._current:
            known = ", ".join(self._current) or "none"
            raise EngineError(f"unknown adapter {name!r}; loaded: {known}")
        version = self._current[name]
        version.users += 1
        try:
            yield version.handle
        finally:
            version.users -= 1
            await asyncio.shield(self._sweep())

    async def replace(self, name: str, version: int, folder: Path, check: Callable[[Any], Awaitable[None]]) -> None:
        """Load a version, let ``check`` look at it, make it current and let the one before it go.

        Waits for older versions of this name to be gone, so that vLLM never holds more than two. When loading or
        ``check`` fails the version before it stays current. Raises EngineError.
        """
        async with self._left:
            await self._left.wait_for(lambda: not any(v.name == name for v in self._leaving))
        number = next(self._ids)
        handle = self._make_handle(lora_name=f"{name}-v{version}-{number}", lora_int_id=number, lora_path=str(folder))
        loaded = AdapterVersion(name, handle, folder)
        try:
            await self._add(loaded, version)
            await check(handle)
        except BaseException:
            self._leaving.add(loaded)
            await self._sweep()
            raise
        before, self._current[name] = self._current.get(name), loaded
        if before is not None:
            self._leaving.add(before)
        await self._sweep()

    async def _add(self, loaded: AdapterVersion, version: int) -> None:
        try:
            accepted = await self._llm.add_lora(loaded.handle)
        except Exception as error:
            raise EngineError(f"vLLM can't load adapter {loaded.name!r} version {version}: {error}") from error
        if not accepted:
            raise EngineError(f"vLLM refused adapter {loaded.name!r} version {version} without a reason")

    async def _sweep(self) -> None:
        """Remove the versions that nobody uses any more."""
        while version := next((v for v in self._leaving if v.users == 0), None):
            self._leaving.remove(version)
            try:
                await self._llm.remove_lora(version.handle.lora_int_id)
            except Exception as error:  # the request or load that led here has its own result or error to report
                _log.warning("vLLM could not remove %s: %s", version.handle.lora_name, error)
            shutil.rmtree(version.folder, ignore_errors=True)
        async with self._left:
            self._left.notify_all()
