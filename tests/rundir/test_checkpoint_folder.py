"""Which checkpoint is used, which are kept, and what is never deleted."""

import json
import logging

import pytest
import torch

from trinity_vlm.checkpoint import (
    CheckpointState,
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    save_checkpoint,
)
from trinity_vlm.errors import CheckpointError
from trinity_vlm.rundir.checkpoints import discard_after, list_checkpoints


def state(step, value=None):
    value = float(step) if value is None else value
    return CheckpointState(step, {"policy": {"w": torch.full((64,), value)}, "ema": {"u": torch.ones(3)}}, {"n": step})


def save(root, step, keep_last=2, keep_every=0, value=None):
    return save_checkpoint(root, state(step, value), keep_last=keep_last, keep_every=keep_every)


def steps(root):
    return [step for step, _ in list_checkpoints(root)]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [10]), (3, 0, [8, 9, 10]), (2, 4, [4, 8, 9, 10]), (1, 5, [5, 10]), (99, 0, list(range(1, 11)))],
)
def test_last_k_and_every_mth_are_kept(tmp_path, keep_last, keep_every, kept):
    """Retention after ten saves, worked by hand."""
    for step in range(1, 11):
        save(tmp_path, step, keep_last, keep_every)
    assert steps(tmp_path) == kept


def test_best_outlives_retention_until_another_is_named(tmp_path):
    """The one named as best is kept; once another is named the former one goes at the next save."""
    save(tmp_path, 1, keep_last=1)
    mark_best(tmp_path, 1)
    for step in (2, 3):
        save(tmp_path, step, keep_last=1)
    assert steps(tmp_path) == [1, 3]
    assert best_checkpoint(tmp_path).name == "step-000001"
    mark_best(tmp_path, 3)
    save(tmp_path, 4, keep_last=1)
    assert steps(tmp_path) == [3, 4]


def test_only_an_existing_checkpoint_can_be_best(tmp_path):
    """Naming a step that was never saved raises and leaves the former name."""
    save(tmp_path, 1)
    mark_best(tmp_path, 1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        mark_best(tmp_path, 7)
    assert best_checkpoint(tmp_path).name == "step-000001"


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "one flipped bit in tensors": lambda p: flip_byte(p / "policy.safetensors"),
    "one flipped bit in meta": lambda p: flip_byte(p / "meta.json"),
    "a cut file": lambda p: (p / "ema.safetensors").write_bytes((p / "ema.safetensors").read_bytes()[:-1]),
    "an empty file": lambda p: (p / "policy.safetensors").write_bytes(b""),
    "a missing file": lambda p: (p / "ema.safetensors").unlink(),
    "a missing manifest": lambda p: (p / "manifest.json").unlink(),
    "a cut manifest": lambda p: (p / "manifest.json").write_text('{"format_version": 1,'),
    "a manifest of zeros": lambda p: (p / "manifest.json").write_bytes(bytes(100)),
    "a manifest of another shape": lambda p: (p / "manifest.json").write_text('{"format_version": 1, "step": 2}'),
    "a manifest of another step": lambda p: (p / "manifest.json").write_text(
        (p.parent / "step-000001" / "manifest.json").read_text()
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_newest_is_skipped_with_a_warning(tmp_path, caplog, damage):
    """Whatever happened to the newest, the one before is used, the warning names it, and loading it raises."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage(newest)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    assert str(newest) in caplog.text
    if "another step" not in str(damage):
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(newest)


def test_a_damaged_checkpoint_is_written_anew(tmp_path):
    """Training goes on from step 1 and reaches step 2 again: the damaged one is replaced."""
    save(tmp_path, 1)
    flip_byte(save(tmp_path, 2) / "policy.safetensors")
    path = save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == path
    assert load_checkpoint(path).meta == {"n": 2}


def test_none_without_checkpoints_but_an_error_when_all_are_damaged(tmp_path):
    """A new run starts at step 0; a run whose checkpoints are all damaged must not silently start over."""
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    flip_byte(save(tmp_path, 1) / "policy.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        latest_checkpoint(tmp_path)


def test_a_newer_format_is_refused_not_skipped(tmp_path):
    """A checkpoint of a newer version is intact: falling back to an older one would lose steps unseen."""
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    for attempt in (lambda: latest_checkpoint(tmp_path), lambda: load_checkpoint(manifest.parent)):
        with pytest.raises(CheckpointError, match=r"format 99 is newer.*upgrade"):
            attempt()


def test_temporaries_are_ignored_and_removed_at_the_next_save(tmp_path):
    """What a killed save left is no checkpoint, and the next save clears it."""
    save(tmp_path, 1)
    left = tmp_path / ".tmp-step-000002"
    left.mkdir()
    (left / "policy.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path).name == "step-000001"
    assert left.exists(), "a reader must not delete what a live trainer may be writing"
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_saving_the_same_step_twice(tmp_path):
    """Equal content is accepted without a rewrite; other content of one step raises and keeps the first."""
    first = save(tmp_path, 1)
    stamp = first.stat().st_mtime_ns
    assert save(tmp_path, 1) == first
    assert first.stat().st_mtime_ns == stamp
    with pytest.raises(CheckpointError, match="another state of step 1"):
        save(tmp_path, 1, value=7.0)
    assert load_checkpoint(first).tensors["policy"]["w"][0] == 1.0


def test_saving_before_a_later_checkpoint_is_refused(tmp_path):
    """Otherwise the abandoned future would be the newest at the next resume."""
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match="later than step 3"):
        save(tmp_path, 3)
    discard_after(tmp_path, 2)
    save(tmp_path, 3)
    assert steps(tmp_path) == [3]


def test_discarding_never_takes_an_intact_best(tmp_path):
    """Going back before an intact best one raises and deletes nothing; a damaged best one goes with its name."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=9)
    mark_best(tmp_path, 2)
    with pytest.raises(CheckpointError, match="named as best"):
        discard_after(tmp_path, 1)
    assert steps(tmp_path) == [1, 2, 3]
    flip_byte(tmp_path / "step-000002" / "policy.safetensors")
    discard_after(tmp_path, 1)
    assert steps(tmp_path) == [1]
    assert best_checkpoint(tmp_path) is None


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep_last):
    """Retention that would delete the checkpoint just written is a programming error."""
    with pytest.raises(ValueError, match="at least 1"):
        save(tmp_path, 1, keep_last=keep_last)
