"""A run directory is created, read, resumed and truncated without ever losing or doubling a step."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from rundir_helpers import die_at_call, full_disk_at_call, make_config, make_rollouts, make_scored, run_in_child

from trinity_vlm.checkpoint import CheckpointState, latest_checkpoint, mark_best, save_checkpoint
from trinity_vlm.config import load_config
from trinity_vlm.errors import CheckpointError, RunDirectoryError
from trinity_vlm.rundir import Evaluation, RunDirectory, config_hash

STORED_RUN = Path(__file__).parent / "data" / "run-v1"


def write_step(run, step):
    """Everything a step leaves, in the loop's order."""
    scored = make_scored(step=step)
    run.write_episodes(step, [run.episode_table([scored], make_rollouts(scored))])
    run.write_evaluation(step, Evaluation((True, False), (True, True), ("count", "")))
    run.append_metrics(step, {"fact": step / 10})
    state = CheckpointState(step, {"policy": {"w": torch.full((8,), float(step))}}, {"step": step})
    save_checkpoint(run.checkpoints_path, state, keep_last=2, keep_every=0)


def steps_of(run):
    return [row["step"] for row in run.read_metrics()]


def test_a_new_run_holds_what_the_docs_say(tmp_path, config):
    """Files of a fresh run; the configuration reads back equal; the manifest carries version, hash and digest."""
    with RunDirectory.create(tmp_path / "runs" / "a", config, prompt_digest="abc") as run:
        names = {p.name for p in run.path.iterdir()}
    assert names == {
        "manifest.json", "config.yaml", "environment.json", "run.lock", "episodes", "evaluations", "checkpoints",
    }  # fmt: skip
    again = RunDirectory.open(run.path)
    assert again.config == config
    assert (again.manifest.format_version, again.manifest.prompt_digest) == (1, "abc")
    assert again.manifest.config_hash == config_hash(config)
    assert again.run_id == run.run_id
    assert len(run.run_id) == 12


def test_environment_names_versions_and_hardware_but_no_one(tmp_path, config):
    """Versions, platform, CPU, GPUs and a start time; neither host name, user nor any path; one entry per session."""
    run = RunDirectory.create(tmp_path / "a", config)
    run.close()
    RunDirectory.resume(run.path).close()
    first, second = run.sessions()
    assert first["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "peft", "trinity-vlm"} <= first["versions"].keys()
    assert {"start_time", "git_commit", "platform", "cpu", "cpu_count", "gpus"} <= first.keys()
    assert first["start_time"] <= second["start_time"]
    text = (run.path / "environment.json").read_text()
    assert str(Path.home()) not in text.replace("/root/", str(Path.home()))
    assert "/" not in text.replace("Linux/", "")
    assert socket.gethostname() not in text


def test_foreign_folders_and_existing_runs_are_left_alone(tmp_path, config):
    """A file, a folder with anything in it, and an existing run are refused, untouched, with what to do instead."""
    (tmp_path / "file").write_text("x")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.yaml").write_text("mine")
    RunDirectory.create(tmp_path / "run", config).close()
    for name, text in [("file", "is a file"), ("foreign", "not empty"), ("run", "resume .*or choose another")]:
        with pytest.raises(RunDirectoryError, match=text):
            RunDirectory.create(tmp_path / name, config)
    assert [p.name for p in foreign.iterdir()] == ["config.yaml"]
    (tmp_path / "empty").mkdir()
    RunDirectory.create(tmp_path / "empty", config).close()


def test_killed_at_every_instant_of_creation(tmp_path, config):
    """Whatever a killed creation left is either a whole run or can be created again at the same path."""
    for number in range(1, 200):
        path = tmp_path / str(number)
        status = run_in_child(lambda path=path: RunDirectory.create(path, config), die_at_call(number))
        if (path / "manifest.json").exists():
            assert RunDirectory.open(path).config == config
            RunDirectory.resume(path).close()
        else:
            if path.exists() and any(path.iterdir()):
                assert (path / "run.lock").exists()
            RunDirectory.create(path, config).close()
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert number > 15


def test_killed_at_every_instant_of_a_step_and_resumed(tmp_path, config):
    """Kill step 3 at each of its writing calls; after resume and truncation the run is exactly the checkpoint's, and
    playing on gives each step once in metrics, episodes, evaluations and checkpoints."""
    with RunDirectory.create(tmp_path / "start", config) as run:
        write_step(run, 1), write_step(run, 2)
    for number in range(1, 300):
        path = shutil.copytree(tmp_path / "start", tmp_path / str(number))

        def third(path=path, number=number):
            with RunDirectory.resume(path) as run:
                die_at_call(number)()
                write_step(run, 3)

        status = run_in_child(third)
        with RunDirectory.resume(path) as run:
            done = int(latest_checkpoint(run.checkpoints_path).name.removeprefix("step-"))
            assert done in (2, 3)
            run.truncate_after(done)
            expected = list(range(1, done + 1))
            assert steps_of(run) == run.episode_steps() == list(run.read_evaluations()) == expected
            write_step(run, done + 1)
            assert steps_of(run) == run.episode_steps() == list(run.read_evaluations()) == [*expected, done + 1]
            assert [row["fact"] for row in run.read_metrics()] == [step / 10 for step in [*expected, done + 1]]
            assert not list(path.rglob(".tmp-*"))
        if status == 0:
            break
    assert status == 0
    assert number > 40


def test_truncation_goes_back_to_a_checkpoint(tmp_path, config):
    """Later lines, episodes, evaluations and checkpoints go; step 0, recorded before training, stays."""
    with RunDirectory.create(tmp_path / "a", config) as run:
        run.append_metrics(0, {"eval/accuracy": 0.5})
        for step in (1, 2, 3):
            write_step(run, step)
        run.truncate_after(2)
        assert steps_of(run) == [0, 1, 2]
        assert run.episode_steps() == [1, 2]
        assert latest_checkpoint(run.checkpoints_path).name == "step-000002"
        run.append_metrics(3, {})
        run.truncate_after(0)
        assert steps_of(run) == [0]
        assert run.episode_steps() == []
        run.append_metrics(1, {})


def test_truncation_never_drops_an_intact_best(tmp_path, config):
    """Going back before the best checkpoint raises before anything is dropped."""
    with RunDirectory.create(tmp_path / "a", config) as run:
        write_step(run, 1), write_step(run, 2)
        mark_best(run.checkpoints_path, 2)
        with pytest.raises(CheckpointError, match="named as best"):
            run.truncate_after(1)
        assert steps_of(run) == run.episode_steps() == [1, 2]


def test_reading_only_never_writes(tmp_path, config):
    """A run opened for reading refuses every writing method; so does a closed one."""
    run = RunDirectory.create(tmp_path / "a", config)
    reader = RunDirectory.open(run.path)
    run.close()
    for closed in (reader, run):
        for write in (
            lambda r: r.append_metrics(1, {}),
            lambda r: r.write_episodes(1, [r.episode_table([], [])]),
            lambda r: r.write_evaluation(1, Evaluation((), (), ())),
            lambda r: r.truncate_after(0),
        ):
            with pytest.raises(RunDirectoryError, match="reading only"):
                write(closed)


def test_missing_foreign_damaged_and_newer_runs_are_named(tmp_path, config):
    """Each is refused with its own text; a newer format says to upgrade."""
    RunDirectory.create(tmp_path / "a", config).close()
    manifest = tmp_path / "a" / "manifest.json"
    original = json.loads(manifest.read_text())
    cases = [
        (json.dumps(original | {"format_version": 2}), "format 2, .* reads formats up to 1: upgrade"),
        (json.dumps(original | {"format": "other"}), "another program"),
        (json.dumps(original | {"format_version": None}), "another program"),
        ("{", "damaged"),
        ("[]", "damaged"),
    ]
    for text, expected in cases:
        manifest.write_text(text)
        for attempt in (RunDirectory.open, RunDirectory.resume, lambda p: RunDirectory.create(p, config)):
            with pytest.raises(RunDirectoryError, match=expected):
                attempt(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory.open(tmp_path / "nowhere")


def test_a_stored_run_of_format_1_stays_readable():
    """A run written by the first version of the format, kept as it was: config, metrics, episodes, evaluations."""
    run = RunDirectory.open(STORED_RUN)
    assert run.manifest.format_version == 1
    assert run.config.images.source == "photos"
    assert [row["step"] for row in run.read_metrics()] == [0, 1]
    (row,) = run.read_episodes(1).to_pylist()
    assert row["candidates"][0]["question"] == "How many?"
    assert row["solutions"][0]["reward"]["total"] == 0.85
    assert run.read_evaluations()[1].correct == (True, False)


def test_a_run_whose_settings_have_retired_since_stays_readable_and_resumable(tmp_path):
    """Written when vLLM's share of the GPU was a setting and resources could not change on a resume; both twice."""
    shutil.copytree(STORED_RUN.with_name("run-v1-vllm"), tmp_path / "a")
    for cache in (3.0, 4.0):
        assert RunDirectory.open(tmp_path / "a").config.images.source == "photos"
        asked = ["images.source=photos", f"engine.vllm.kv_cache_gib={cache}", "update.overlap=off"]
        with RunDirectory.resume(tmp_path / "a", load_config("tiny", asked)) as run:
            assert run.config.engine.vllm.kv_cache_gib == cache
            assert run.config.update.lr == 4e-4
        RunDirectory.resume(tmp_path / "a").close()


def test_a_run_of_before_that_was_edited_is_still_noticed(tmp_path):
    shutil.copytree(STORED_RUN.with_name("run-v1-vllm"), tmp_path / "a")
    path = tmp_path / "a" / "config.yaml"
    path.write_text(path.read_text().replace("alpha_q: 0.3", "alpha_q: 0.4"))
    with pytest.raises(RunDirectoryError, match="was edited"):
        RunDirectory.resume(tmp_path / "a")


def test_a_damaged_or_missing_episode_file_is_named(tmp_path, config):
    """The error gives the file and which steps there are."""
    with RunDirectory.create(tmp_path / "a", config) as run:
        with pytest.raises(RunDirectoryError, match="no episodes of step 9; this run has none"):
            run.read_episodes(9)
        path = run.write_episodes(1, [run.episode_table([make_scored()], [])])
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(RunDirectoryError, match=r"step-000001\.parquet: damaged"):
            run.read_episodes(1)
        with pytest.raises(RunDirectoryError, match=r"steps 1 to 1 \(1 files\)"):
            run.read_episodes(2)


def test_a_full_disk_is_named_and_the_run_stays_whole(tmp_path, config, monkeypatch):
    """ENOSPC while writing episodes or metrics: the text gives path and free space; nothing half-written remains."""
    with RunDirectory.create(tmp_path / "a", config) as run:
        write_step(run, 1)
        for write in (
            lambda: run.write_episodes(2, [run.episode_table([make_scored()], [])]),
            lambda: run.append_metrics(2, {"fact": 1.0}),
        ):
            with pytest.MonkeyPatch.context() as patch:
                full_disk_at_call(1, patch.setattr)
                with pytest.raises(RunDirectoryError, match=r"No space left on device; .* free on that disk"):
                    write()
        assert steps_of(run) == run.episode_steps() == [1]
        assert not list(run.path.rglob(".tmp-*"))
        write_step(run, 2)
        assert steps_of(run) == run.episode_steps() == [1, 2]


# --- one writer ---------------------------------------------------------------------------------------------------


def wait_for(path):
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def test_two_processes_cant_train_in_one_run(tmp_path, config):
    """While another process holds the run, resume and create name its id; reading works; its death frees the run."""
    RunDirectory.create(tmp_path / "a", config).close()
    ready = tmp_path / "ready"
    pid = os.fork()
    if pid == 0:
        try:
            run = RunDirectory.resume(tmp_path / "a")
            ready.touch()
            time.sleep(60)
            run.close()
        finally:
            os._exit(0)
    try:
        wait_for(ready)
        with pytest.raises(RunDirectoryError, match=f"in use by process {pid}"):
            RunDirectory.resume(tmp_path / "a")
        assert RunDirectory.open(tmp_path / "a").read_metrics() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    RunDirectory.resume(tmp_path / "a").close()


def test_one_process_cant_hold_a_run_twice(tmp_path, config):
    """The lock is per opening; closing frees it, also when a resume failed half-way."""
    run = RunDirectory.create(tmp_path / "a", config)
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        RunDirectory.resume(run.path)
    run.close()
    with pytest.raises(RunDirectoryError, match="seed"):
        RunDirectory.resume(run.path, make_config(seed=1))
    RunDirectory.resume(run.path).close()


def test_a_worker_that_outlives_its_trainer_does_not_keep_the_lock(tmp_path, config):
    """The trainer forks a worker and is killed; the orphan lives on, and the run can be resumed at once."""
    ready, worker_pid = tmp_path / "ready", tmp_path / "worker"
    trainer = os.fork()
    if trainer == 0:
        try:
            run = RunDirectory.create(tmp_path / "a", config)
            worker = os.fork()
            if worker == 0:
                assert not run.writable
                ready.touch()
                time.sleep(60)
                os._exit(0)
            worker_pid.write_text(str(worker))
            time.sleep(60)
        finally:
            os._exit(1)
    wait_for(ready), wait_for(worker_pid)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    orphan = int(worker_pid.read_text())
    try:
        os.kill(orphan, 0)
        RunDirectory.resume(tmp_path / "a").close()
    finally:
        os.kill(orphan, signal.SIGKILL)
