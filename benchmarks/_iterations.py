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
    """``at``: when its outputs came, seconds since the epoch; prompt tokens it read; sequences it gave a token."""

    at: float
    prompt_tokens: int
    sequences: int


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
        """Of a line's arguments: engine, index, requests and tokens of prompts, requests and tokens generated, ..."""
        if "Iteration(" in record.msg and isinstance(record.args, tuple):
            numbers = [int(str(value)) for value in record.args[2:6]]
            self.found.append(Iteration(record.created, numbers[1], numbers[2]))

    def between(self, start: float, end: float) -> Row:
        """Seconds, number and median milliseconds of decode iterations, by how many sequences they served, and of those
        that read prompts as well. An iteration lasts from the outputs before it to its own: pauses in which nothing was
        asked count, in seconds and not in medians (vLLM's own times leave out what it does asynchronously)."""
        during = [iteration for iteration in self.found if start <= iteration.at <= end]
        lasted = [(now, now.at - before.at) for before, now in pairwise(during)]
        rows = _summary("iterations/with_prompts", [s for i, s in lasted if i.prompt_tokens])
        decoding = [(i.sequences, s) for i, s in lasted if not i.prompt_tokens]
        for low, high in pairwise((0, *BOUNDS)):
            rows |= _summary(f"iterations/decode_{low + 1}_to_{high}", [s for n, s in decoding if low < n <= high])
        return rows


def _summary(name: str, seconds: Sequence[float]) -> Row:
    if not seconds:
        return {}
    median = round(statistics.median(seconds) * 1e3, 2)
    return {name: {"seconds": round(sum(seconds), 2), "count": len(seconds), "median_ms": median}}
