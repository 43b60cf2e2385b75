"""A process killed at any instant, or a disk that is full at any write, leaves the last checkpoint usable."""

import os
import random
import resource
import signal
import subprocess
import time
from itertools import pairwise

import pytest
import torch
from rundir_helpers import die_at_call, full_disk_at_call, run_in_child

from trinity_vlm.checkpoint import CheckpointState, latest_checkpoint, load_checkpoint, mark_best, save_checkpoint
from trinity_vlm.errors import CheckpointError
from trinity_vlm.rundir.checkpoints import find_damage, list_checkpoints

WORDS = 1 << 18


def state(step, words=1000):
    return CheckpointState(step, {"policy": {"w": torch.full((words,), float(step))}, "ema": {}}, {"step": step})


def save(root, step, words=1000, keep_last=2):
    return save_checkpoint(root, state(step, words), keep_last=keep_last, keep_every=0)


def newest_step(root):
    """The step that a resume would go on from, its content checked."""
    loaded = load_checkpoint(latest_checkpoint(root))
    assert set(loaded.tensors["policy"]["w"].tolist()) == {float(loaded.step)}
    assert loaded.meta == {"step": loaded.step}
    return loaded.step


def temporaries(root):
    return [p.name for p in root.iterdir() if p.name.startswith(".tmp-")]


def test_killed_before_every_system_call_of_a_save(tmp_path):
    """Kill a save that keeps only itself before its 1st, 2nd, ... writing call: the newest complete checkpoint loads
    each time and is never older than the one before the save, no other is left with files missing, and the next save
    works and cleans up."""
    for number in range(1, 200):
        root = tmp_path / str(number)
        save(root, 1), save(root, 2)
        status = run_in_child(lambda root=root: save(root, 3, keep_last=1), die_at_call(number))
        assert newest_step(root) in (2, 3)
        assert [find_damage(path) for _, path in list_checkpoints(root)] == [None] * len(list_checkpoints(root))
        save(root, 4)
        assert newest_step(root) == 4
        assert temporaries(root) == []
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert number > 20, "the save must have been cut at many places"


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_at_random_instants_while_saving_without_pause(tmp_path):
    """SIGKILL from outside at random moments of larger saves; each child goes on where the last was killed."""
    generator = random.Random(5)

    def save_for_ever():
        step = newest_step(tmp_path) if latest_checkpoint(tmp_path) else 0
        while True:
            step += 1
            save(tmp_path, step, WORDS)

    reached = [0]
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever()
            finally:
                os._exit(1)
        wait_until(lambda: max((step for step, _ in list_checkpoints(tmp_path)), default=0) > reached[-1])
        time.sleep(generator.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        reached.append(newest_step(tmp_path))
    assert all(later > earlier for earlier, later in pairwise(reached))


def test_killed_while_naming_the_best(tmp_path):
    """The name of the best is the former or the new one, never half a file."""
    for number in range(1, 30):
        root = tmp_path / str(number)
        save(root, 1), save(root, 2), mark_best(root, 1)
        status = run_in_child(lambda root=root: mark_best(root, 2), die_at_call(number))
        save(root, 3), save(root, 4), save(root, 5)
        best = {p.name for p in root.iterdir()} - {"best.json", "step-000004", "step-000005"}
        assert best in ({"step-000001"}, {"step-000002"})
        if status == 0:
            break
    assert status == 0


def save_on_full_disk(root, number):
    """Save step 3 on a disk that is full from the ``number``-th call on; returns the error's text, None without one."""
    with pytest.MonkeyPatch.context() as patch:
        full_disk_at_call(number, patch.setattr)
        try:
            save(root, 3)
        except CheckpointError as error:
            return str(error)
    return None


def test_full_disk_at_every_write_fsync_and_rename(tmp_path, caplog):
    """ENOSPC at each call: CheckpointError names path, cause and free space; no temporary is left; a resume works."""
    failures = 0
    for number in range(1, 60):
        root = tmp_path / str(number)
        save(root, 1), save(root, 2)
        text = save_on_full_disk(root, number)
        if text is not None:
            failures += 1
            assert "No space left on device" in text
            assert str(root) in text
            assert " free on that disk" in text
        assert newest_step(root) in ((3,) if text is None else (2, 3))
        if text is None and "could not be deleted" not in caplog.text:
            break
        caplog.clear()
        assert temporaries(root) == []
        save(root, 4)
        assert newest_step(root) == 4
    assert failures >= 10


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path):
    """The kernel's own refusal (EFBIG under RLIMIT_FSIZE, in a child process): the text names the file, nothing is
    left behind, and the checkpoint before loads."""
    save(tmp_path, 1)

    def save_under_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CheckpointError, match=r"policy\.safetensors: File too large; .* free on that disk"):
            save(tmp_path, 2, WORDS)

    assert run_in_child(save_under_limit) == 0
    assert temporaries(tmp_path) == []
    assert newest_step(tmp_path) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    """A checkpoint larger than the disk fails cleanly, the one before loads, and smaller ones can be saved again."""
    save(small_disk, 1)
    with pytest.raises(
        CheckpointError, match=r"step 2 was not written: .*policy\.safetensors: No space left"
    ) as caught:
        save(small_disk, 2, WORDS * 2)
    assert "the last complete one is step-000001" in str(caught.value)
    assert temporaries(small_disk) == []
    assert newest_step(small_disk) == 1
    save(small_disk, 2)
    assert newest_step(small_disk) == 2
