"""metrics.jsonl: strict JSON, one line a step, torn lines never counted."""

import json
import math

import numpy as np
import pytest
import torch

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.metrics_log import MetricsLog


@pytest.fixture
def log(tmp_path):
    return MetricsLog(tmp_path / "metrics.jsonl")


def strict(line):
    def refuse(name):
        raise AssertionError(name)

    return json.loads(line, parse_constant=refuse)


def test_each_step_is_one_strict_json_object(log):
    """Python, numpy and torch numbers are plain numbers on disk; NaN and infinities are null and come back as NaN."""
    log.append(0, {})
    log.append(1, {"fact": 0.1, "count": 3, "np": np.float32(0.5), "t": torch.tensor(2.0), "tier/rule": True})
    log.append(2, {"chal_selected": math.nan, "ratio": math.inf, "low": -math.inf, "fact": 1e-300})
    lines = log.path.read_text().splitlines()
    assert strict(lines[0]) == {"step": 0}
    assert strict(lines[1]) == {"step": 1, "fact": 0.1, "count": 3.0, "np": 0.5, "t": 2.0, "tier/rule": 1.0}
    assert strict(lines[2]) == {"step": 2, "chal_selected": None, "ratio": None, "low": None, "fact": 1e-300}
    rows = log.read()
    assert rows[1]["fact"] == 0.1
    assert math.isnan(rows[2]["ratio"])
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert isinstance(rows[2]["step"], int)


def test_a_step_is_never_written_twice_or_out_of_order(log):
    """The last step or an earlier one raises, also in a new process; the reserved key raises; nothing is written."""
    log.append(4, {"a": 1.0})
    before = log.path.read_bytes()
    for writer in (log, MetricsLog(log.path)):
        for step in (4, 3, 0):
            with pytest.raises(RunDirectoryError, match=f"already holds step 4, so step {step}"):
                writer.append(step, {})
        with pytest.raises(RunDirectoryError, match="can't be called 'step'"):
            writer.append(5, {"step": 1.0})
    assert log.path.read_bytes() == before


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_line_torn_at_any_byte_is_not_there(log, cut):
    """Readers stop before it, the next writer cuts it off, and the step can be written again."""
    log.append(1, {"fact": 0.5})
    whole = log.path.read_bytes()
    log.append(2, {"fact": 0.25})
    torn = log.path.read_bytes()[:-cut]
    assert len(torn) >= len(whole)
    log.path.write_bytes(torn)
    other = MetricsLog(log.path)
    assert [row["step"] for row in other.read()] == [1]
    assert log.path.read_bytes() == torn, "reading must not change a live run's file"
    other.append(2, {"fact": 0.25})
    assert [row["fact"] for row in other.read()] == [0.5, 0.25]


def test_truncation_cuts_at_the_step_and_a_torn_end(log):
    """Lines up to the step stay byte for byte."""
    for step in (0, 1, 2, 5):
        log.append(step, {"x": step})
    first_three = b"".join(log.path.read_bytes().splitlines(keepends=True)[:3])
    with log.path.open("ab") as file:
        file.write(b'{"step": 6, "x')
    log.truncate_after(4)
    assert log.path.read_bytes() == first_three
    log.append(3, {})
    log.truncate_after(-1)
    assert log.read() == []
    log.append(0, {})


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"step": "1"}', '{"step": 1, "a": "x"}', '{"step": 1, "a": NaN}', "junk"]
)
def test_a_damaged_line_is_named(log, line):
    """A complete line that is no metrics object raises with file and line number; it is never skipped."""
    log.append(0, {})
    with log.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: "):
        log.read()
