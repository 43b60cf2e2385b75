"""The benchmark of the tiny preset's step: its command line is that of the other benchmarks, and it runs."""

import runpy
import sys
from pathlib import Path

import pytest

from trinity_vlm.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_time.py"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["many"], 2), (["0"], 2), (["2", "--nope"], 2)])
def test_help_and_usage_errors_end_as_with_any_program(monkeypatch, capsys, arguments, code):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert "[STEPS] [KEY=VALUE ...]" in (printed.err if code else printed.out)


def test_steps_and_settings_are_those_of_the_command_line(monkeypatch, capsys):
    run(monkeypatch, "1", "images.per_step=1", "roles.candidates=2", "roles.solutions=2")
    printed = capsys.readouterr().out
    assert ", 1 steps" in printed
    assert all(f"{phase} " in printed for phase in ("episodes", "update", "ema", "step"))
    with pytest.raises(ConfigError, match=r"roles\.candidats"):
        run(monkeypatch, "1", "roles.candidats=2")
