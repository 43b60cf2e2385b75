"""Decoding with a cache of fixed shape and the step captured as a CUDA graph.

A step of a small batch is dominated by launching hundreds of kernels; a captured step is one launch. Shapes are fixed
per graph, so batches are padded to buckets (rows and cache columns in powers of two) and moved to another bucket when
rows finish or columns run out. Between two looks at the results nothing waits for the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_vlm.backbone import Backbone
from trinity_vlm.engine.decoding import Row, constrained, logprob_list, prefill, record, sampling_rows
from trinity_vlm.engine.kv_cache import Arena, GrowingLayer, growing_cache, layer_tensors
from trinity_vlm.engine.sampling import SamplingRows, chosen_logprobs, sample

_STEPS_BETWEEN_LOOKS = 16
_SMALLEST_BATCH = 4
_CACHE_STEP = 128
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Unfinished rows between two steps.

    columns: per layer the keys and values written so far, [n, heads, written, head_dim]
    mask: [n, written], 1 where a column counts
    tokens, positions: [n], the token drawn last and its rotary position; step: its index in the completion
    rules: how the rows draw
    """

    rows: list[Row]
    columns: list[tuple[Tensor, Tensor]]
    mask: Tensor
    tokens: Tensor
    positions: Tensor
    rules: SamplingRows
    step: int

    @property
    def written(self) -> int:
        return self.mask.shape[1]

    @property
    def remaining(self) -> int:
        """Tokens the row with most room may still draw."""
        return max(row.budget - len(row.token_ids) for row in self.rows)

    def unfinished(self) -> _State | None:
        """A copy with only the rows that go on; None when there are none."""
        indices = [i for i, row in enumerate(self.rows) if not row.finished]
        if not indices:
            return None
        kept = torch.tensor(indices, device=self.mask.device)
        return _State(
            [self.rows[i] for i in indices],
            [(keys[kept], values[kept]) for keys, values in self.columns],
            self.mask[kept],
            self.tokens[kept],
            self.positions[kept],
            self.rules.select(kept),
            self.step,
        )


class _Bucket:
    """One decode step for a fixed number of rows and columns.

    draws: the step samples its own next token; else it leaves ``logits`` and the caller fills ``tokens``
    """

    def __init__(self, backbone: Backbone, arena: Arena, key: _BucketKey) -> None:
        device, rows = backbone.device, key.rows
        self.backbone, self.rows, self.length, self.draws = backbone, rows, key.length, key.draws
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.cache = arena.cache(rows, key.length, self.slot)
        self.mask = torch.zeros(rows, 1, 1, key.length, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.step = torch.zeros((), dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.drawn = torch.zeros(rows, _STEPS_BETWEEN_LOOKS, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, _STEPS_BETWEEN_LOOKS, device=device)
        self.rules = SamplingRows.placeholder(rows, key.width, device)
        self.logits = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    def seat(self, state: _State) -> None:
        """Load n <= B rows; the others repeat the first one and are ignored."""
        n, written = state.mask.shape
        source = torch.arange(self.rows, device=self.mask.device)
        source = torch.where(source < n, source, 0)
        for (keys, values), (given_keys, given_values) in zip(layer_tensors(self.cache), state.columns, strict=True):
            keys[:, :, :written] = given_keys[source]
            values[:, :, :written] = given_values[source]
        self.mask.zero_()
        self.mask[:, 0, 0, :written] = state.mask[source].bool()
        self.tokens[:, 0] = state.tokens[source]
        self.positions[:, 0] = state.positions[source]
        self.rules.copy_(state.rules.select(source))
        self.slot.fill_(written)
        self.step.fill_(state.step)
        self.column.zero_()

    def state(self, rows: list[Row], written: int, step: int) -> _State:
        """What the first rows stand at; views into the buffers."""
        n = len(rows)
        return _State(
            rows,
            [(keys[:n, :, :written], values[:n, :, :written]) for keys, values in layer_tensors(self.cache)],
            self.mask[:n, 0, 0, :written],
            self.tokens[:n, 0],
            self.positions[:n, 0],
            self.rules,
            step,
        )

    def capture(self, pool: Any) -> None:
        """Record the step. What the buffers held is lost: seat afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
                self._rewind()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._run()
        self._graph = graph

    def advance(self) -> None:
        """One token per row."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def _rewind(self) -> None:
        for counter in (self.slot, self.column, self.step):
            counter.zero_()

    def _run(self) -> None:
        self.mask.index_fill_(3, self.slot, True)
        hidden = self.backbone.next_hidden(self.tokens, self.mask, self.positions, self.cache)
        self.logits = self.backbone.logits(hidden[:, -1])
        self.slot.add_(1)
        self.positions.add_(1)
        self.step.add_(1)
        if self.draws:
            drawn = sample(self.logits, self.rules, self.step)
            self.drawn.index_copy_(1, self.column, drawn[:, None])
            self.logprobs.index_copy_(1, self.column, chosen_logprobs(self.logits, drawn)[:, None])
            self.tokens.copy_(drawn[:, None])
            self.column.add_(1)


@dataclass(frozen=True, slots=True)
class _BucketKey:
    """What a captured step depends on. ``width``: candidates looked at; ``draws``: the step samples its next token."""

    adapter: str | None
    rows: int
    length: int
    width: int
    draws: bool


class StaticDecoder:
    """Decodes like ``decoding.decode``, with the same draws. ``capture`` off runs the same steps without graphs."""

    def __init__(self, backbone: Backbone, *, capture: bool) -> None:
        self._backbone = backbone
        self._capture = capture
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._arena: Arena | None = None
        self._buckets: dict[_BucketKey, _Bucket] = {}

    @staticmethod
    def supports(backbone: Backbone) -> bool:
        """Whether every layer of the model is plain full attention."""
        return all(type(layer) is GrowingLayer for layer in growing_cache(backbone.model.config).layers)

    @torch.no_grad()
    def decode(self, rows: Sequence[Row], adapter: str | None) -> None:
        """Fill tokens, log-probabilities and ends of every row under ``adapter``, which must be active."""
        self._backbone.model.eval()
        state = self._first_token(list(rows)).unfinished()
        while state is not None:
            state = self._in_one_bucket(state, adapter)

    def _first_token(self, rows: list[Row]) -> _State:
        start = prefill(self._backbone, rows)
        logits = self._backbone.logits(start.hidden)
        rules = sampling_rows(self._backbone, rows)
        tokens = sample(constrained(logits, rows), rules, torch.tensor(0, device=logits.device))
        record(rows, tokens.tolist(), logprob_list(logits, tokens, rows), self._backbone.eos_ids)
        columns = [(keys[start.prompt_of], values[start.prompt_of]) for keys, values in layer_tensors(start.cache)]
        return _State(rows, columns, start.mask, tokens, start.next_position, rules, step=0)

    def _in_one_bucket(self, state: _State, adapter: str | None) -> _State | None:
        """Run until everything is finished (None), columns run out, or half of the rows would do."""
        bucket = self._bucket(state, adapter)
        bucket.seat(state)
        rows, written, step, remaining = state.rows, state.written, state.step, state.remaining
        while True:
            count = min(_STEPS_BETWEEN_LOOKS, remaining, bucket.length - written)
            (self._draw_inside if bucket.draws else self._draw_outside)(bucket, rows, count)
            written, step, remaining = written + count, step + count, remaining - count
            num_unfinished = sum(not row.finished for row in rows)
            if num_unfinished == 0 or written == bucket.length or 2 * _row_bucket(num_unfinished) <= bucket.rows:
                return bucket.state(rows, written, step).unfinished()

    def _draw_inside(self, bucket: _Bucket, rows: list[Row], count: int) -> None:
        for _ in range(count):
            bucket.advance()
        drawn, logprobs = bucket.drawn.tolist(), bucket.logprobs.tolist()
        bucket.column.zero_()
        for column in range(count):
            record(rows, [d[column] for d in drawn], [p[column] for p in logprobs], self._backbone.eos_ids)

    def _draw_outside(self, bucket: _Bucket, rows: list[Row], count: int) -> None:
        for _ in range(count):
            bucket.advance()
            logits = bucket.logits[: len(rows)]
            tokens = sample(constrained(logits, rows), bucket.rules.head(len(rows)), bucket.step)
            bucket.tokens[: len(rows), 0] = tokens
            record(rows, tokens.tolist(), logprob_list(logits, tokens, rows), self._backbone.eos_ids)

    def _bucket(self, state: _State, adapter: str | None) -> _Bucket:
        rows = _row_bucket(len(state.rows))
        longest = -(-(state.written + state.remaining) // _CACHE_STEP) * _CACHE_STEP
        length = min(longest, _power_of_two(2 * state.written))
        draws = not any(row.constraint for row in state.rows)
        key = _BucketKey(adapter, rows, length, state.rules.width, draws)
        if self._arena is None or self._arena.cells < rows * longest:
            self._buckets.clear()
            self._arena = None  # gives the memory back before more is taken
            self._arena = Arena(state.columns, rows * longest)
        if key not in self._buckets:
            bucket = _Bucket(self._backbone, self._arena, key)
            if self._capture:
                self._try_capture(bucket)
            self._buckets[key] = bucket
        return self._buckets[key]

    def _try_capture(self, bucket: _Bucket) -> None:
        try:
            bucket.capture(self._pool)
        except RuntimeError as error:
            self._capture = False
            _log.warning("the decode step can't be captured as a CUDA graph and runs eagerly (slower): %s", error)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _row_bucket(number: int) -> int:
    """The next of 4, 6, 8, 12, 16, 24, 32 ..."""
    power = _power_of_two(max(number, _SMALLEST_BATCH))
    return power * 3 // 4 if number <= power * 3 // 4 and power > _SMALLEST_BATCH else power
