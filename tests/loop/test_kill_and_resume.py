"""A run killed with SIGKILL at random instants and resumed ends with the same bits as one that was never touched."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from trinity_vlm.checkpoint import load_checkpoint
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.rundir.checkpoints import latest_checkpoint

SETTINGS = [
    "steps=6",
    "images.per_step=2",
    "roles.candidates=2",
    "roles.solutions=2",
    "evaluation.problems=8",
    "evaluation.every=3",
    "checkpoint.every=1",
]
COMMAND = [sys.executable, "-c", "from trinity_vlm.cli.main import run; run()"]


def start(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output


def without_timings(rows):
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "memory/"))} for row in rows]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    path = tmp_path_factory.mktemp("untouched") / "run"
    began = time.monotonic()
    finish(start("train", "tiny", f"run_dir={path}", *SETTINGS))
    return path, time.monotonic() - began


def assert_same_run(left, right):
    """Metrics (timings aside), episodes and every tensor of the last checkpoint are equal bit for bit."""
    a, b = RunDirectory.open(left), RunDirectory.open(right)
    assert without_timings(a.read_metrics()) == without_timings(b.read_metrics())
    assert a.episode_steps() == b.episode_steps()
    for step in a.episode_steps():
        assert a.read_episodes(step).equals(b.read_episodes(step))
    states = [load_checkpoint(latest_checkpoint(run.checkpoints_path)) for run in (a, b)]
    assert states[0].step == states[1].step
    assert states[0].meta == states[1].meta
    for group, tensors in states[0].tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1].tensors[group][name]), f"{group}/{name}"


@pytest.mark.long
def test_ten_kills_at_random_instants_leave_no_trace(untouched, tmp_path):
    reference, seconds = untouched
    path = tmp_path / "run"
    rng = random.Random(20_261_130)
    process = start("train", "tiny", f"run_dir={path}", *SETTINGS)
    for _ in range(10):
        time.sleep(rng.uniform(0.3, 0.9) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        arguments = ["resume", str(path)] if (path / "manifest.json").exists() else ["train", "tiny", f"run_dir={path}"]
        process = start(*arguments, *([] if arguments[0] == "resume" else SETTINGS))
    finish(process)
    assert_same_run(reference, path)


@pytest.mark.long
def test_a_finished_run_is_extended_by_raising_steps(untouched, tmp_path):
    """Resuming a finished run with more steps appends; a metrics line is neither lost nor written twice."""
    path = tmp_path / "run"
    finish(start("train", "tiny", f"run_dir={path}", *SETTINGS, "steps=2"))
    finish(start("resume", str(path), "steps=4"))
    assert [row["step"] for row in RunDirectory.open(path).read_metrics()] == [0, 1, 2, 3, 4]
