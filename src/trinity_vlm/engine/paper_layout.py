"""The paper's layout of a step around any engine: one phase at a time, one set of weights at a time. For comparison.

    episode coroutines --generate--> held --every live episode waits--> one phase: [swap] -> sub-batch -> sub-batch ...

A phase is what waits for one adapter and one kind of call, the earliest kind first; all else stays held until every
live episode waits again. The engine holds one adapter's weights as its own ("swapped into the rollout engine as
needed", A.2), so a phase of another adapter is preceded by a swap. The paper's "generation sub-batch size" (A.2: 2 for
Qwen3-VL-8B, 4 for Qwen2.5-VL-7B) is read as prompts generated together, each with all of its samples (requests of one
seed); the next sub-batch starts when the last sequence of the one before it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

from trinity_vlm.engine.barrier import Barrier
from trinity_vlm.engine.protocol import Engine, GenerationRequest
from trinity_vlm.errors import EngineError
from trinity_vlm.types import CallType, Completion

if TYPE_CHECKING:
    import torch

_CALL_ORDER = {call: position for position, call in enumerate(CallType)}


@dataclass(slots=True, eq=False)
class _Held:
    """One request that waits for its phase."""

    request: GenerationRequest
    adapter: str
    episode: object | None
    answer: asyncio.Future[list[Completion]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def phase(self) -> tuple[int, str]:
        return _CALL_ORDER[self.request.call], self.adapter

    @property
    def order(self) -> tuple[tuple[bool, str | int], ...]:
        return tuple((isinstance(part, str), part) for part in self.request.order_key)


class PaperLayoutEngine:
    """Phase barriers, weight swaps and sub-batches around ``inner``, which is asked without any adapter.

    swap: puts an adapter's current weights into ``inner`` as its only ones, and returns when they are there
    sub_batch: prompts generated together; None: a whole phase
    swaps, swap_seconds, phases: counted since the start
    """

    def __init__(self, inner: Engine, swap: Callable[[str], object], sub_batch: int | None = None) -> None:
        self.inner = inner
        self.swaps = 0
        self.swap_seconds = 0.0
        self.phases = 0
        self.sub_batch = sub_batch
        self._swap = swap
        self._in_engine: str | None = None
        self._barrier: Barrier[_Held] = Barrier(self._begin_phase)
        self._task: asyncio.Task[None] | None = None

    def episode(self) -> AbstractContextManager[None]:
        """Held by a coroutine while it may send requests: no phase starts before it waits or leaves."""
        return self._barrier.episode()

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """As ``inner`` answers, in the request's own phase.

        Raises EngineError for the bare base model, whose weights are never swapped in, and what ``inner`` or the swap
        raises.
        """
        if request.adapter is None:
            raise EngineError(f"a {request.call} call without adapter: engine.layout=paper swaps adapters in, no base")
        held = _Held(request, request.adapter, self._barrier.ticket)
        return await self._barrier.hold(held, held.answer)

    def load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Hand the adapter to ``inner``; whatever weights it holds as its own are outdated from here on."""
        self.inner.load_adapter(name, version, state)
        self._in_engine = None

    @property
    def counters(self) -> dict[str, int]:
        """Swaps and phases since the start, beside what ``inner`` counts."""
        return {**getattr(self.inner, "counters", {}), "swaps": self.swaps, "phases": self.phases}

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()

    # Serving a phase

    def _begin_phase(self) -> None:
        self._barrier.closed = True
        self._task = asyncio.get_running_loop().create_task(self._serve(self._next_phase()))

    def _next_phase(self) -> list[_Held]:
        """Takes the requests of the earliest kind of call out of what is held, in the order of their keys."""
        waiting = self._barrier.waiting
        first = min(held.phase for held in waiting)
        phase = [held for held in waiting if held.phase == first]
        self._barrier.waiting = [held for held in waiting if held.phase != first]
        return sorted(phase, key=lambda held: held.order)

    async def _serve(self, phase: Sequence[_Held]) -> None:
        prompts = [list(samples) for _, samples in groupby(phase, key=lambda held: held.request.seed)]
        size = self.sub_batch or len(prompts)
        try:
            self._swap_in(phase[0].adapter)
            self.phases += 1
            for start in range(0, len(prompts), size):
                with self.inner.episode():
                    async with asyncio.TaskGroup() as group:
                        for held in chain.from_iterable(prompts[start : start + size]):
                            group.create_task(self._answer(held))
        except Exception as failure:
            error = failure.exceptions[0] if isinstance(failure, ExceptionGroup) else failure
            for held in phase:
                if not held.answer.done():
                    held.answer.set_exception(error)
        finally:
            self._barrier.closed = False
            self._barrier.stir()

    def _swap_in(self, adapter: str) -> None:
        if adapter == self._in_engine:
            return
        self._in_engine = None
        start = time.perf_counter()
        self._swap(adapter)
        self.swap_seconds += time.perf_counter() - start
        self.swaps += 1
        self._in_engine = adapter

    async def _answer(self, held: _Held) -> None:
        if held.answer.done():
            return
        completions = await self.inner.generate(replace(held.request, adapter=None))
        if not held.answer.done():
            held.answer.set_result(completions)
