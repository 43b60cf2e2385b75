"""The verified question-answer pairs of a run as a parquet data set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.atomic import TEMPORARY_PREFIX, disk_errors, remove
from trinity_vlm.rundir.directory import RunDirectory

_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_FIELDS = [
    ("question", pa.string()),
    ("answer", pa.string()),
    ("proposed_answer", pa.string()),
    ("difficulty", pa.float64()),
    ("solver_success_rate", pa.float64()),
    ("num_solutions", pa.int32()),
    ("selected", pa.bool_()),
    ("disputed", pa.bool_()),
    ("adopted_without_verdict", pa.bool_()),
    ("step", pa.int32()),
    ("image_uid", pa.string()),
    ("run_id", pa.string()),
]
_FEATURE_NAMES: Mapping[pa.DataType, str] = {
    pa.string(): "string",
    pa.float64(): "float64",
    pa.int32(): "int32",
    pa.bool_(): "bool",
}


def export_pairs(run: RunDirectory, out: Path, images: bool, *, selected_only: bool = True) -> int:
    """Write one row per verified pair to the parquet file ``out``; returns the number of rows.

    Columns: question; answer (the reference after a dispute), proposed_answer (the Questioner's), difficulty;
    solver_success_rate (mean correctness of the num_solutions formatted solutions, null without any);
    selected, disputed (a dispute was raised), adopted_without_verdict; step, image_uid, run_id. ``images`` adds
    the thumbnail as column ``image``, which ``datasets.load_dataset("parquet", data_files=...)`` decodes.

    selected_only: False takes every candidate that passed screening; those never solved have no success rate
    Raises RunDirectoryError when thumbnails are asked for but were switched off, or ``out`` can't be written.
    """
    if images and run.config.images.thumbnails == "off":
        raise RunDirectoryError(
            f"{run.path} was run with images.thumbnails=off, so it holds no pixels; export without images"
        )
    temporary = out.with_name(TEMPORARY_PREFIX + out.name)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            count = _write_pairs(run, temporary, _schema(images), images, selected_only)
            os.replace(temporary, out)
        finally:
            remove(temporary)
    return count


def _write_pairs(run: RunDirectory, out: Path, schema: pa.Schema, images: bool, selected_only: bool) -> int:
    """One step in memory at a time; returns the number of rows."""
    count = 0
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for step in run.episode_steps():
            rows = list(_pairs_of_step(run, step, images, selected_only))
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _pairs_of_step(run: RunDirectory, step: int, images: bool, selected_only: bool) -> Iterator[dict[str, object]]:
    for episode in run.read_episodes(step).to_pylist():
        for position, candidate in enumerate(episode["candidates"]):
            selected = position == episode["selected"]
            if _passed(candidate) and (selected or not selected_only):
                row = _pair(episode, candidate, selected) | {"run_id": run.run_id}
                if images:
                    row["image"] = {"bytes": episode["thumbnail"], "path": None}
                yield row


def _passed(candidate: Mapping[str, Any]) -> bool:
    """What selection asks for: format, grounding and answer (Section 2)."""
    screening = candidate["screening"]
    return bool(
        candidate["format_valid"]
        and screening
        and screening["parsed"]
        and screening["fact_q"] == 1
        and screening["corr_a"] == 1
    )


def _pair(episode: Mapping[str, Any], candidate: Mapping[str, Any], selected: bool) -> dict[str, object]:
    dispute = episode["dispute"] if selected else None
    formatted = [s for s in episode["solutions"] if s["format_valid"]] if selected else []
    correct = [s["correctness"]["correct"] if s["correctness"] else 0 for s in formatted]
    return {
        "question": candidate["question"],
        "answer": episode["reference"] if selected else candidate["answer"],
        "proposed_answer": candidate["answer"],
        "difficulty": candidate["screening"]["difficulty"],
        "solver_success_rate": sum(correct) / len(correct) if correct else None,
        "num_solutions": len(formatted),
        "selected": selected,
        "disputed": dispute is not None,
        "adopted_without_verdict": dispute is not None and dispute["adopted_without_verdict"],
        "step": episode["step"],
        "image_uid": episode["image_uid"],
    }


def _schema(images: bool) -> pa.Schema:
    """The columns, with the note by which ``datasets`` knows that ``image`` is to be decoded."""
    features: dict[str, object] = {name: {"dtype": _FEATURE_NAMES[kind], "_type": "Value"} for name, kind in _FIELDS}
    fields = list(_FIELDS)
    if images:
        fields.append(("image", _IMAGE_TYPE))
        features["image"] = {"_type": "Image"}
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})
