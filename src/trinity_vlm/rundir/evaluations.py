"""Outcomes of held-out evaluations, problem by problem, so that two evaluations can be paired."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from trinity_vlm.statistics import Interval, wilson_interval

EVALUATION_SCHEMA = pa.schema([("correct", pa.bool_()), ("formatted", pa.bool_()), ("kind", pa.string())])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Per-problem outcomes in problem order; ``kinds`` groups them, e.g. by question type. All of one length."""

    correct: tuple[bool, ...]
    formatted: tuple[bool, ...]
    kinds: tuple[str, ...]

    @property
    def accuracy(self) -> Interval:
        return wilson_interval(sum(self.correct), len(self.correct))

    @property
    def format_rate(self) -> float:
        return sum(self.formatted) / len(self.formatted)


def evaluation_table(evaluation: Evaluation) -> pa.Table:
    """One row per problem, in problem order."""
    columns = [list(evaluation.correct), list(evaluation.formatted), list(evaluation.kinds)]
    return pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, EVALUATION_SCHEMA, strict=True)], schema=EVALUATION_SCHEMA
    )


def evaluation_from_table(table: pa.Table) -> Evaluation:
    """The inverse of ``evaluation_table``."""
    columns = (tuple(table.column(name).to_pylist()) for name in EVALUATION_SCHEMA.names)
    return Evaluation(*columns)
