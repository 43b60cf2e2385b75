"""Training that stops early leaves no empty run behind, and says how to go on with one that holds something."""

import shlex
from pathlib import Path

import pytest
from rich.console import Console

from trinity_vlm import loop
from trinity_vlm.cli.console import ConsoleReporter
from trinity_vlm.cli.leaving import removed_if_empty, way_back
from trinity_vlm.cli.main import EXIT_FAILURE, EXIT_INTERRUPT, EXIT_USER, main
from trinity_vlm.config import load_config
from trinity_vlm.errors import ModelLoadError, TrainingError
from trinity_vlm.rundir import RunDirectory

FAST = ("images.per_step=1", "roles.candidates=2", "roles.solutions=2", "evaluation.source=null", "steps=3")


def raising(error):
    """A function that fails with it, whatever it is called with."""

    def fail(*_arguments, **_keywords):
        raise error

    return fail


def train(path, *overrides):
    return main(["train", "tiny", f"run_dir={path}", *FAST, *overrides])


def stop_in_step(monkeypatch, step):
    """Ctrl-C right after the line of ``step``, before its checkpoint."""
    original = ConsoleReporter.step

    def interrupted(self, number, total, metrics):
        original(self, number, total, metrics)
        if number == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(ConsoleReporter, "step", interrupted)


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("assemble", ModelLoadError("no hub"), EXIT_USER),
        ("assemble", KeyboardInterrupt(), EXIT_INTERRUPT),
        ("check_that_images_matter", TrainingError("blind"), EXIT_FAILURE),
        ("outer_step", TrainingError("not a number"), EXIT_FAILURE),
    ],
)
def test_a_start_that_fails_leaves_no_run_directory(capsys, monkeypatch, tmp_path, where, error, code):
    """So that the corrected command, with the same run_dir, starts; nothing is said of resuming."""
    path = tmp_path / "run"
    monkeypatch.setattr(loop, where, raising(error))
    assert train(path) == code
    printed = capsys.readouterr()
    assert "is removed again" in printed.out
    assert "resume" not in printed.err
    assert not path.exists()
    monkeypatch.undo()
    assert train(path, "steps=1") == 0


def test_what_was_recorded_stays_and_the_interrupt_names_the_way_back(capsys, monkeypatch, tmp_path):
    """The real directory, quoted for the shell, and the step of the last checkpoint; the command works as printed."""
    path = tmp_path / "my run"
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3)
        assert train(path, "checkpoint.every=2") == EXIT_INTERRUPT
    hint, end = capsys.readouterr().err.splitlines()
    assert end == "interrupted"
    command, after = hint.split("`")[1:]
    assert after == " goes on after step 2 of 3"
    assert shlex.split(command)[-2:] == ["resume", str(path)]
    assert main(shlex.split(command)[1:]) == 0
    assert "going on after step 2 of 3" in capsys.readouterr().out


def test_an_interrupt_before_the_first_checkpoint_says_so(capsys, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        stop_in_step(patch, 1)
        assert train(tmp_path / "run") == EXIT_INTERRUPT
    assert "goes on with step 1, for there is no checkpoint yet" in capsys.readouterr().err


def test_a_resume_that_fails_removes_nothing(monkeypatch, tmp_path):
    path = tmp_path / "run"
    with RunDirectory.create(path, load_config("tiny", FAST)):
        pass
    monkeypatch.setattr(loop, "assemble", raising(ModelLoadError("no hub")))
    assert main(["resume", str(path)]) == EXIT_USER
    assert (path / "manifest.json").exists()


def test_an_interrupted_resume_of_an_empty_run_names_the_way_back(capsys, monkeypatch, tmp_path):
    """It removes nothing, so there is something to go on with."""
    path = tmp_path / "run"
    with RunDirectory.create(path, load_config("tiny", FAST)):
        pass
    monkeypatch.setattr(loop, "assemble", raising(KeyboardInterrupt()))
    assert main(["resume", str(path)]) == EXIT_INTERRUPT
    assert f"resume {path}` goes on with step 1" in capsys.readouterr().err


def fail(run, error=TrainingError):
    with pytest.raises(error), way_back(run, "this"), removed_if_empty(run, Console()):
        raise error


def test_only_the_worker_that_created_a_run_removes_it_or_speaks_of_it(capsys, tmp_path):
    """Others have opened it to read."""
    with RunDirectory.create(tmp_path / "run", load_config("tiny")) as run:
        for error in (TrainingError, KeyboardInterrupt):
            fail(RunDirectory.open(run.path), error)
        assert run.path.exists()
        printed = capsys.readouterr()
        assert printed.out + printed.err == ""
        fail(run)
        assert not run.path.exists()


def test_a_folder_that_was_there_before_stays(capsys, tmp_path):
    """Also as a link; and the corrected start finds it empty."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    for name in ("mine", "link"):
        with RunDirectory.create(tmp_path / name, load_config("tiny")) as run:
            fail(run)
        assert list((tmp_path / name).iterdir()) == []
        assert "is removed again" in capsys.readouterr().out


def test_what_cannot_be_removed_is_not_said_to_be(capsys, monkeypatch, tmp_path):
    with RunDirectory.create(tmp_path / "run", load_config("tiny")) as run, monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", raising(PermissionError()))
        fail(run)
    assert "could not be removed" in " ".join(capsys.readouterr().out.split())


def test_a_run_is_empty_until_anything_is_written_into_it(tmp_path):
    """Metrics, episodes, a half-written checkpoint, or a file of the user's own."""
    with RunDirectory.create(tmp_path / "run", load_config("tiny")) as run:
        assert run.is_empty
        for name in (
            "metrics.jsonl",
            "episodes/step-000001.parquet",
            "episodes/config.yaml",
            "checkpoints/step-000001/state",
            "notes.txt",
        ):
            file = run.path / name
            file.parent.mkdir(exist_ok=True)
            file.touch()
            assert not run.is_empty
            file.unlink()
            if file.parent.name.startswith("step-"):
                file.parent.rmdir()
        assert run.is_empty
