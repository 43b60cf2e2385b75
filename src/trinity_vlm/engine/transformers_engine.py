"""The in-process engine: waiting requests become batches on the very model object the trainer updates.

    episode coroutines --generate--> waiting requests --every live episode waits, loop settled--> batches --> futures

Deterministic: what runs together depends only on which requests wait, never on timing. Requests are ordered by their
keys, grouped by adapter and sorted by prompt length; noise depends on (seed, position) alone. Decoding runs in the
event loop's own thread. Guaranteed on the same hardware: the same requests give the same bits. An episode
alone and among others gets the same draws; its logits may differ in the last bits, as batch shapes do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from trinity_vlm.backbone import Backbone, EncodedPrompt
from trinity_vlm.engine.barrier import Barrier
from trinity_vlm.engine.constrained import Constraint, Grammars
from trinity_vlm.engine.decoding import Row, decode
from trinity_vlm.engine.graphs import StaticDecoder
from trinity_vlm.engine.kv_cache import cache_tokens
from trinity_vlm.engine.prefixes import Beginnings
from trinity_vlm.engine.protocol import GenerationRequest
from trinity_vlm.errors import EngineError
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import Completion

_LENGTH_SPREAD = 2.0


@dataclass(slots=True, eq=False)
class _Job:
    """One waiting request with its rows."""

    request: GenerationRequest
    prompt: EncodedPrompt
    rows: list[Row]
    episode: object | None
    future: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def order(self) -> tuple[tuple[bool, str | int], ...]:
        return tuple((isinstance(part, str), part) for part in self.request.order_key)


class TransformersEngine:
    """Engine over a Backbone; the adapters are the backbone's own.

    max_batch_sequences: sequences decoded side by side
    cuda_graphs: on a GPU, decode with a static cache and captured steps
    """

    def __init__(self, backbone: Backbone, max_batch_sequences: int, cuda_graphs: bool) -> None:
        self.backbone = backbone
        self._max_batch_sequences = max_batch_sequences
        self._grammars = Grammars(backbone.tokenizer, backbone.num_logits)
        captures = cuda_graphs and backbone.device.type == "cuda" and StaticDecoder.supports(backbone)
        self._static = StaticDecoder(backbone, capture=True) if captures else None
        self._cache_tokens = cache_tokens(backbone)
        self._barrier: Barrier[_Job] = Barrier(self._dispatch)

    def episode(self) -> AbstractContextManager[None]:
        """Held by a coroutine while it may send requests: nothing is dispatched before it waits or leaves."""
        return self._barrier.episode()

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """``request.n`` completions in sample order; see the protocol.

        Raises EngineError for an unknown adapter, an image or schema that can't be used, and a failed pass.
        """
        job = self._job(request)
        if job.rows:
            await self._barrier.hold(job, job.future)
        return self._completions(job)

    def close(self) -> None:
        """Nothing to let go of: the model belongs to the backbone."""

    def load_adapter(self, name: str, version: int, state: Mapping[str, Tensor]) -> None:
        """Replace adapter ``name`` in place; raises EngineError for wrong keys or while requests wait."""
        if waiting := self._barrier.waiting:
            raise EngineError(f"adapter {name!r} version {version}: {len(waiting)} requests are in flight")
        self.backbone.load_adapter_state(name, state)

    # Dispatching

    def _dispatch(self) -> None:
        jobs, self._barrier.waiting = sorted(self._barrier.waiting, key=lambda job: job.order), []
        try:
            for adapter, rows in self._batches(jobs):
                with self.backbone.use_adapter(adapter), self.backbone.fused_for_decoding():
                    if self._static is None:
                        decode(self.backbone, rows)
                    else:
                        self._static.decode(rows, adapter)
        except Exception as error:
            for job in jobs:
                if not job.future.done():
                    failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    job.future.set_exception(failure)
            return
        for job in jobs:
            if not job.future.done():
                job.future.set_result(None)

    def _batches(self, jobs: Sequence[_Job]) -> Iterator[tuple[str | None, list[Row]]]:
        """Rows that run together, with their adapter: similar prompt lengths, constrained rows among themselves."""
        groups: dict[tuple[str | None, bool], list[Row]] = {}
        for job in jobs:
            groups.setdefault((job.request.adapter, job.request.json_schema is not None), []).extend(job.rows)
        for (adapter, _), rows in groups.items():
            batch: list[Row] = []
            beginnings = Beginnings()
            for row in sorted(rows, key=lambda r: len(r.prompt.input_ids)):
                joined = beginnings.joined(row.prompt)
                if batch and not self._fits(batch, row, joined):
                    yield adapter, batch
                    batch, joined = [], Beginnings().joined(row.prompt)
                batch.append(row)
                beginnings = joined
            yield adapter, batch

    def _fits(self, batch: Sequence[Row], row: Row, joined: Beginnings) -> bool:
        """Whether a row with a prompt at least as long as theirs may join; ``joined``: of all their prompts."""
        if len(row.prompt.input_ids) > _LENGTH_SPREAD * len(batch[0].prompt.input_ids):
            return False
        prompt = joined.width if self.backbone.shares_prompts else joined.longest
        tokens = prompt + max(r.budget for r in (*batch, row))
        limit = max(1, self._cache_tokens // tokens) if self._cache_tokens else self._max_batch_sequences
        return len(batch) < min(limit, self._max_batch_sequences)

    # Requests and completions

    def _job(self, request: GenerationRequest) -> _Job:
        backbone = self.backbone
        if request.adapter is not None and request.adapter not in backbone.adapter_names:
            known = ", ".join(backbone.adapter_names) or "none"
            raise EngineError(f"unknown adapter {request.adapter!r}; loaded: {known}")
        try:
            prompt = backbone.encode(request.prompt)
        except ValueError as error:
            raise EngineError(f"the prompt of a {request.call} call can't be encoded: {error}") from error
        budget = min(request.sampling.max_tokens, backbone.context - len(prompt.input_ids))
        rows = [
            Row(
                prompt,
                request.sampling,
                derive_seed(request.seed, request.first + i),
                budget,
                request.want_logprobs,
                self._constraint(request),
            )
            for i in range(request.n if budget > 0 else 0)
        ]
        return _Job(request, prompt, rows, self._barrier.ticket)

    def _constraint(self, request: GenerationRequest) -> Constraint | None:
        if request.json_schema is None:
            return None
        return Constraint(self._grammars, request.json_schema, request.schema_after)

    def _completions(self, job: _Job) -> list[Completion]:
        ids = job.prompt.input_ids
        if not job.rows:
            logprobs = () if job.request.want_logprobs else None
            return [Completion(ids, (), "", "length", logprobs)] * job.request.n
        return [
            Completion(
                prompt_token_ids=ids,
                token_ids=tuple(row.token_ids),
                text=self.backbone.decode(row.token_ids),
                finish_reason="stop" if row.ended else "length",
                logprobs=tuple(row.logprobs) if row.want_logprobs else None,
            )
            for row in job.rows
        ]
