"""The README.md that goes with a built checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TEXT = """---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---
# The embedded tiny VLM

A Qwen3-VL (`Qwen3VLForConditionalGeneration`) of {parameters:,} parameters with its own byte-level BPE tokenizer of
2,048 entries, trained from scratch on procedural images (shapes on a grid, bar and line charts). It plays every
role of a self-evolving VLM: it proposes questions, solves them with a short trace, screens them, scores reasoning,
compares answers and settles disputes. It knows nothing else: no photographs, no free text.

It is a test bed. The policy's calls were trained on the base style of images only, the Verifier's calls on more
styles, and the model evolves on a shifted style (`{evolve_style}`): what is missing there is headroom on purpose.

Built by `trinity_vlm.tiny.build`:

| stage | steps | examples | seconds of training | seed | hardware | torch | transformers | date |
|---|---|---|---|---|---|---|---|---|
{stages}

| measured | {heads} |
|---|{rules}|
{rows}

Solver accuracy is greedy unless named sampled; Verifier calls are sampled as in a run, without a schema. The names are
explained in `trinity_vlm/tiny/measure.py`; log.jsonl holds the whole build.
"""


def card(reports: Mapping[str, Mapping[str, float]], events: Sequence[Mapping[str, Any]], evolve_style: str) -> str:
    """Markdown with the role report; ``events`` are the lines of the build's log."""
    names = list(reports)
    metrics = dict.fromkeys(metric for report in reports.values() for metric in report)
    rows = [f"| {m} | " + " | ".join(f"{reports[n].get(m, float('nan')):.3f}" for n in names) + " |" for m in metrics]
    return _TEXT.format(
        parameters=next(e["parameters"] for e in events if e["event"] == "saved"),
        evolve_style=evolve_style,
        stages="\n".join(_stages(events)),
        heads=" | ".join(names),
        rules="|".join(["---"] * len(names)),
        rows="\n".join(rows),
    )


def _stages(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table row per training run in the log: each begins with its start and ends with its last progress."""
    starts = [i for i, e in enumerate(events) if e["event"] == "start"]
    rows = []
    for begin, end in zip(starts, [*starts[1:], len(events)], strict=True):
        start = events[begin]
        last = [e for e in events[begin:end] if e["event"] == "progress"][-1]
        cells = (
            start["stage"],
            start["steps"],
            f"{last['examples']:,}",
            f"{last['seconds']:.0f}",
            start["settings"]["seed"],
            *(start[key] for key in ("hardware", "torch", "transformers", "date")),
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows
