"""Several engines behind one: each adapter's requests go to the engine that plays it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from trinity_vlm.engine.protocol import Engine, GenerationRequest
from trinity_vlm.types import Completion

if TYPE_CHECKING:
    import torch


class RoutedEngine:
    """``routes`` maps adapter names to engines with weights of their own; all other requests go to ``default``.

    RoutedEngine(own_engine, {VERIFIER: OpenAIEngine(...)}) plays the Verifier on another model (Appendix D).
    """

    def __init__(self, default: Engine, routes: Mapping[str, Engine]) -> None:
        self._default = default
        self._routes = dict(routes)

    @contextmanager
    def episode(self) -> Iterator[None]:
        """An episode of every engine. A batching ``default`` waits with its next batch for routed calls, too."""
        with ExitStack() as stack:
            for engine in (self._default, *self._routes.values()):
                stack.enter_context(engine.episode())
            yield

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """As the engine of the request's adapter does."""
        return await self._engine(request.adapter).generate(request)

    def load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Load into ``default``; an adapter whose role another engine plays is not loaded anywhere."""
        if name not in self._routes:
            self._default.load_adapter(name, version, state)

    @property
    def counters(self) -> dict[str, int]:
        """What the engines count, where they do; a routed engine's under ``<adapter>/``."""
        counts = dict(getattr(self._default, "counters", {}))
        for name, engine in self._routes.items():
            counts |= {f"{name}/{what}": number for what, number in getattr(engine, "counters", {}).items()}
        return counts

    def close(self) -> None:
        """Close every engine."""
        for engine in (self._default, *self._routes.values()):
            engine.close()

    def _engine(self, adapter: str | None) -> Engine:
        return self._default if adapter is None else self._routes.get(adapter, self._default)
