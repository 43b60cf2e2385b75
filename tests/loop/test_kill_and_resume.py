"""A run killed with SIGKILL at random instants and resumed ends with the same bits as one that was never touched."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from trinity_vlm.checkpoint import load_checkpoint
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.rundir.checkpoints import latest_checkpoint, list_checkpoints

STEPS = 14
SETTINGS = [
    f"steps={STEPS}",
    "images.per_step=2",
    "roles.candidates=2",
    "roles.solutions=2",
    "roles.policy_tokens=96",
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


def step_lines(path):
    """The complete metrics lines of training steps. A step that is done again has other timings, so another line."""
    file = path / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if json.loads(line)["step"] > 0]


def wait_for_line(process, path, before, timeout=120):
    """Seconds until ``process`` has written a metrics line that is not in ``before``; fails when it ends first."""
    began = time.monotonic()
    while not set(step_lines(path)) - before:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - began < timeout
        time.sleep(0.02)
    return time.monotonic() - began


def kill(process):
    assert process.poll() is None, "the run had ended before the kill"
    process.send_signal(signal.SIGKILL)
    process.communicate()


@dataclass(frozen=True)
class Untouched:
    """The reference run: seconds from its start to the first metrics line, and per step after it."""

    path: Path
    start_up: float
    per_step: float


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    path = tmp_path_factory.mktemp("untouched") / "run"
    process = start("train", "tiny", f"run_dir={path}", *SETTINGS)
    start_up = wait_for_line(process, path, set())
    finish(process)
    seconds = [row["seconds/step"] for row in RunDirectory.open(path).read_metrics() if row["step"] > 0]
    return Untouched(path, start_up, sum(seconds) / len(seconds))


def assert_same_run(left, right):
    """Metrics (timings aside), episodes and every tensor of the last checkpoint are equal bit for bit."""
    a, b = RunDirectory.open(left), RunDirectory.open(right)
    assert without_timings(a.read_metrics()) == without_timings(b.read_metrics())
    assert a.episode_steps() == b.episode_steps()
    for step in a.episode_steps():
        assert a.read_episodes(step).equals(b.read_episodes(step))
    assert a.read_evaluations() == b.read_evaluations()
    states = [load_checkpoint(latest_checkpoint(run.checkpoints_path)) for run in (a, b)]
    assert states[0].step == states[1].step
    assert states[0].meta == states[1].meta
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for group, tensors in states[0].tensors.items():
        assert tensors.keys() == states[1].tensors[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1].tensors[group][name]), f"{group}/{name}"


def start_or_resume(path):
    if (path / "manifest.json").exists():
        return start("resume", str(path))
    return start("train", "tiny", f"run_dir={path}", *SETTINGS)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_kills_of_a_running_run_leave_no_trace(untouched, tmp_path):
    """Eight kills at a random instant within a step that follows a new metrics line, two during start-up."""
    path = tmp_path / "run"
    rng = random.Random(20_261_130)
    in_steps = [True, False, True, True, True, True, False, True, True, True]
    reached = []
    for within_a_step in in_steps:
        before = set(step_lines(path))
        process = start_or_resume(path)
        if within_a_step:
            wait_for_line(process, path, before)
            time.sleep(rng.random() * untouched.per_step)
        else:
            time.sleep(rng.uniform(0.1, 0.4) * untouched.start_up)
        kill(process)
        assert within_a_step == bool(set(step_lines(path)) - before)
        reached.append(max([step for step, _ in list_checkpoints(path / "checkpoints")], default=0))
        assert reached[-1] < STEPS, f"nothing was left to do at kill {len(reached)}: {reached}"
    assert reached == sorted(reached)
    assert reached[-1] > 0
    finish(start_or_resume(path))
    assert_same_run(untouched.path, path)
    assert len(RunDirectory.open(path).sessions()) >= 9


@pytest.mark.long
def test_a_finished_run_is_extended_by_raising_steps(tmp_path):
    """Resuming a finished run with more steps appends; a metrics line is neither lost nor written twice."""
    path = tmp_path / "run"
    finish(start("train", "tiny", f"run_dir={path}", *SETTINGS, "steps=1"))
    finish(start("resume", str(path), "steps=3"))
    assert [row["step"] for row in RunDirectory.open(path).read_metrics()] == [0, 1, 2, 3]
