"""A run directory that can't be written is named by its key."""

import pytest
from rundir_helpers import full_disk_at_call

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir import RunDirectory


@pytest.mark.parametrize(
    ("below", "cause"), [("file/run", "Not a directory"), ("n" * 300, "File name too long"), ("run", "No space left")]
)
def test_a_folder_that_cant_be_written_is_named_by_its_key(tmp_path, config, monkeypatch, below, cause):
    """Key, value, cause, free space, and what to do; nothing half-made blocks the corrected start."""
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / below
    if cause == "No space left":
        full_disk_at_call(1, monkeypatch.setattr)
    with pytest.raises(RunDirectoryError) as refusal:
        RunDirectory.create(path, config)
    text = str(refusal.value)
    assert text.startswith(f"run_dir={path}: can't be written: ")
    assert cause in text
    assert "free on that disk; choose another run_dir" in text
    monkeypatch.undo()
    RunDirectory.create(tmp_path / "run", config).close()
