"""A whole run on two torchrun processes: one run directory, episodes of both, and a resume."""

import os
import subprocess
import sys

import pytest

from trinity_vlm.rundir import RunDirectory

SETTINGS = [
    "images.per_step=4",
    "roles.candidates=2",
    "roles.solutions=2",
    "evaluation.problems=4",
    "checkpoint.every=1",
]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "trinity_vlm", *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_two_workers_share_images_and_write_one_run(tmp_path):
    path = tmp_path / "run"
    torchrun("train", "tiny", f"run_dir={path}", "steps=1", *SETTINGS)
    torchrun("resume", str(path), "steps=2")
    run = RunDirectory.open(path)
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["episodes"] == 4 for row in rows[1:])
    for step in (1, 2):
        uids = run.read_episodes(step).column("image_uid").to_pylist()
        assert len(set(uids)) == 4


@pytest.mark.long
def test_an_uneven_share_is_refused(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "trinity_vlm", "train", "tiny", f"run_dir={tmp_path / 'run'}", "images.per_step=3"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "images.per_step=3" in done.stdout + done.stderr
