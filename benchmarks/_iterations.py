"""What vLLM's scheduler did, iteration by iteration, read from what vLLM logs of it."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LOGGING = {"enable_logging_iteration_details": True, "disable_log_stats": False}
"""Keyword arguments of AsyncEngineArgs that make vLLM log its iterations."""

BOUNDS = (4, 16, 32, 64, 128, 1024)
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Iteration:
    """``at``: when its outputs came, seconds since the epoch; prompt tokens it read; sequences that it gave a further
    token; ``waited``: vLLM's own "elapsed time" in seconds.

    That is how long vLLM's core did nothing but wait for the result. With asynchronous scheduling, as on GPUs, the next
    iteration has been scheduled and launched by then: nearly all of an iteration bound by the GPU is waited for, and
    nearly nothing of one bound by the host. Without it, it is the sampling alone where core and worker are one process,
    and nearly the whole iteration where they are two, as on CPUs.
    """

    at: float
    prompt_tokens: int
    sequences: int
    waited: float


class Iterations(logging.Handler):
    """Keeps vLLM's lines instead of printing them. Made before vLLM is imported."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[Iteration] = []
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"

    def listen(self) -> None:
        """Once the engine is there: vLLM configures its loggers as it starts, and takes away handlers from before."""
        logger = logging.getLogger("vllm.v1.metrics.loggers")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Of a line's arguments: engine, index, requests and tokens of prompts, requests and tokens generated, ms."""
        if "Iteration(" in record.msg and isinstance(record.args, tuple):
            _, prompt_tokens, sequences, _, waited = (float(str(value)) for value in record.args[2:7])
            self.found.append(Iteration(record.created, int(prompt_tokens), int(sequences), waited / 1e3))

    def between(self, start: float, end: float) -> Row:
        """What iterations took whose outputs came from ``start`` to ``end``: those that read prompts, and the others by
        how many sequences they served; and which share of that time lies in no iteration.

        An iteration that goes on with a sequence lasts from the outputs before it to its own, for that sequence was in
        flight all the while. One that only begins sequences may follow a pause and counts for what vLLM waited for it.
        The first line of all only starts the clock. Outputs are noticed late, and several at once, where this process
        is busy: that moves medians, not means.
        """
        lasted = [(now, now.at - before.at if now.sequences else now.waited) for before, now in pairwise(self.found)]
        during = [pair for pair in lasted if start <= pair[0].at <= end]
        rows = _summary("iterations/with_prompts", [pair for pair in during if pair[0].prompt_tokens])
        decoding = [pair for pair in during if not pair[0].prompt_tokens]
        for low, high in pairwise((0, *BOUNDS)):
            served = [pair for pair in decoding if low < pair[0].sequences <= high]
            rows |= _summary(f"iterations/decode_{low + 1}_to_{high}", served)
        covered = sum(seconds for _, seconds in during)
        return rows | {"iterations/uncovered": round(1 - covered / (end - start), 3)}


def _summary(name: str, lasted: Sequence[tuple[Iteration, float]]) -> Row:
    """Seconds, number, milliseconds, and the share of the seconds that vLLM's core waited."""
    if not lasted:
        return {}
    seconds = [seconds for _, seconds in lasted]
    total = sum(seconds)
    return {
        name: {
            "seconds": round(total, 2),
            "count": len(seconds),
            "median_ms": round(statistics.median(seconds) * 1e3, 2),
            "mean_ms": round(total / len(seconds) * 1e3, 2),
            "waited": round(sum(iteration.waited for iteration, _ in lasted) / total, 3) if total else 0.0,
        }
    }
