"""The demonstration: one command from nothing to a figure and a summary; what the summary may claim."""

import shlex

import pytest
from loop_factory import SMALL, small_config
from PIL import Image

from trinity_vlm import demo
from trinity_vlm.cli.console import ConsoleReporter
from trinity_vlm.cli.demonstrating import verdict
from trinity_vlm.cli.main import EXIT_INTERRUPT, EXIT_USER, main
from trinity_vlm.demo import Row, Summary, photo_folder, summarise
from trinity_vlm.environments import open_environment
from trinity_vlm.rundir import Evaluation, RunDirectory
from trinity_vlm.statistics import Interval

ONE_STEP = ("steps=1", "images.per_step=1", "roles.candidates=2", "roles.solutions=2", "evaluation.problems=4")


def run_demo(path, settings, *options):
    """The exit code of ``trinity-vlm demo`` with these settings."""
    pairs = [part for setting in settings for part in ("--set", setting)]
    return main(["demo", "--run-dir", str(path), *pairs, *options])


def steps_written(path):
    return [row["step"] for row in RunDirectory.open(path).read_metrics()]


def test_a_demo_without_photos_trains_draws_and_compares(capsys, tmp_path):
    path = tmp_path / "demo"
    assert run_demo(path, SMALL, "--no-photos") == 0
    text = capsys.readouterr().out
    assert steps_written(path) == [0, 1, 2]
    assert (path / "figure.png").stat().st_size > 10_000
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip()]
    assert [line for line in lines if line in ("before", "after", "change")] == ["before", "after", "change"]
    assert "on the same 8 problems" in text
    assert "first 1 steps" in text
    assert "Verifier precision" in text
    assert_hint_works(text, path)


def assert_hint_works(text, path):
    """The last line is a command that plays a picture of the kind that the model knows, with what it learnt."""
    command = shlex.split(text.strip().splitlines()[-1].partition("up close, ")[2].partition(":  ")[2])
    assert command[1:] == ["play", str(path / "picture.png"), "--run", str(path)]
    expected = open_environment("microcosm").image("evolve-heldout", 0)[1]
    assert Image.open(path / "picture.png").tobytes() == expected.tobytes()
    assert main(command[1:]) == 0


@pytest.mark.long
def test_a_demo_with_photos_runs_the_same_loop_on_them(capsys, tmp_path, monkeypatch):
    """The second run has its own directory, reads the shipped pictures and claims no accuracy and no truth."""
    monkeypatch.setattr(demo, "PHOTO_STEPS", 1)
    assert run_demo(tmp_path / "demo", ONE_STEP) == 0
    assert "the same loop on a folder of ordinary pictures" in capsys.readouterr().out
    pictures = RunDirectory.open(tmp_path / "demo-pictures")
    (row,) = pictures.read_metrics()
    assert row["step"] == 1
    assert not [key for key in row if key.startswith(("truth/", "eval/"))]
    names = {p.name for p in photo_folder().iterdir()}
    uids = pictures.read_episodes(1).column("image_uid").to_pylist()
    assert len(set(uids)) == 4
    assert all(uid.split("/")[-1] in names for uid in uids)
    assert (pictures.path / "figure.png").exists()


def test_a_second_demo_starts_a_new_numbered_run(capsys, tmp_path):
    path = tmp_path / "demo"
    for _ in range(3):
        assert run_demo(path, ONE_STEP, "--no-photos") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo", "demo-2", "demo-3"]
    assert all(steps_written(p) == [0, 1] for p in tmp_path.iterdir())
    assert str(tmp_path / "demo-3" / "figure.png") in capsys.readouterr().out.replace("\n", "")


def test_an_interrupted_demo_goes_on_where_it_stopped(capsys, tmp_path, monkeypatch):
    """Ctrl-C within step 2 ends with 130; the same command finishes the run it began, in the same directory."""
    path = tmp_path / "demo"
    original = ConsoleReporter.step

    def interrupted(self, step, total, metrics):
        original(self, step, total, metrics)
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleReporter, "step", interrupted)
        assert run_demo(path, [*ONE_STEP, "steps=2"], "--no-photos") == EXIT_INTERRUPT
    assert capsys.readouterr().err.splitlines() == ["the same command goes on after step 1 of 2", "interrupted"]
    assert run_demo(path, [*ONE_STEP, "steps=2"], "--no-photos") == 0
    assert "going on with" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
    assert steps_written(path) == [0, 1, 2]
    assert len(RunDirectory.open(path).sessions()) == 2


@pytest.mark.long
def test_a_demo_interrupted_among_the_photos_goes_on_there(tmp_path, monkeypatch):
    """Only the second run was cut short: the same command must not train the first one anew under another name."""
    monkeypatch.setattr(demo, "PHOTO_STEPS", 2)
    original = ConsoleReporter.step

    def interrupted(self, step, total, metrics):
        original(self, step, total, metrics)
        if total == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleReporter, "step", interrupted)
        assert run_demo(tmp_path / "demo", ONE_STEP) == EXIT_INTERRUPT
    assert run_demo(tmp_path / "demo", ONE_STEP) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo", "demo-pictures"]
    assert steps_written(tmp_path / "demo-pictures") == [1, 2]


def test_a_bad_setting_is_refused_before_anything_is_written(capsys, tmp_path):
    assert run_demo(tmp_path / "demo", ["roles.candidats=3"]) == EXIT_USER
    assert "roles.candidates" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def evaluation(correct, of=8):
    return Evaluation(tuple(i < correct for i in range(of)), (True,) * of, ("",) * of)


def test_summary_windows_and_paired_change_by_hand(tmp_path):
    """Six steps: windows of three. Step 0 is no step of training. 2 of 8 before, 6 of 8 after: +50 points."""
    with RunDirectory.create(tmp_path / "run", small_config("steps=6")) as run:
        run.append_metrics(0, {"eval/accuracy": 0.25})
        for step in range(1, 7):
            truth = {"truth/right": 1.0} if step in (1, 6) else {}
            run.append_metrics(step, {"fmt_q": step / 10, **truth})
        run.write_evaluation(0, evaluation(2))
        run.write_evaluation(3, evaluation(8))
        run.write_evaluation(6, evaluation(6))
        found = summarise(run)
    assert (found.steps, found.window, found.problems) == (6, 3, 8)
    (curve,) = found.curves
    assert (curve.name, curve.first, curve.last) == ("Questioner format", pytest.approx(0.2), pytest.approx(0.5))
    assert found.truths == (Row("candidates with a right answer", 1.0, 1.0),)
    assert found.before.value == 0.25
    assert found.after.value == 0.75
    assert found.change.value == pytest.approx(0.5)
    # differences: four 1 and four 0; sample variance (4 - 8 * 0.25) / 7
    assert found.change.high - 0.5 == pytest.approx(1.959964 * (2 / 7 / 8) ** 0.5, rel=1e-5)


def test_summary_of_a_run_without_evaluation_claims_nothing(tmp_path):
    with RunDirectory.create(tmp_path / "run", small_config()) as run:
        run.append_metrics(1, {"fmt_q": 0.5})
        found = summarise(run)
    assert (found.steps, found.window, found.problems) == (1, 1, 0)
    assert found.before is found.after is found.change is None
    assert verdict(found) == ""


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.01, 0.05, "rise"), (-0.05, -0.01, "fall"), (-0.01, 0.05, "no change"), (0.0, 0.05, "no change")],
)
def test_the_verdict_says_no_more_than_the_interval(low, high, word):
    change = Interval((low + high) / 2, low, high)
    assert word in verdict(Summary(40, 10, (), (), None, None, change, 1024))
