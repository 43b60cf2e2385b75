"""What a run's lines in the terminal are, and commands in texts that work as typed."""

import ast
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import trinity_vlm
from trinity_vlm.cli import demonstrating
from trinity_vlm.cli.console import HEADER_EVERY, ConsoleReporter
from trinity_vlm.cli.invocation import as_typed, invocation
from trinity_vlm.cli.leaving import way_back
from trinity_vlm.cli.main import EXIT_USER, app, main
from trinity_vlm.cli.training import resuming
from trinity_vlm.config import load_config
from trinity_vlm.demo import Summary
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.workers import Workers

SOURCES = sorted(Path(trinity_vlm.__file__).parent.rglob("*.py"))
COMMANDS = [command.name for command in app.registered_commands]
LINE = {"seconds/step": 2.0, "retained/questioner": 3, "retained/solver": 4}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a program and a Python of a virtual environment, neither on PATH."""
    folder = tmp_path / "my place" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("trinity-vlm", "python"):
        (folder / name).touch(mode=0o755)
    monkeypatch.chdir(folder.parents[1])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return folder


def reported(*steps):
    """What a reporter prints of these steps on a terminal of 80 columns."""
    console = Console(width=80, record=True, file=io.StringIO())
    reporter = ConsoleReporter(console)
    for step in steps:
        reporter.step(step, 100, LINE)
    return console.export_text().splitlines()


def test_every_column_of_a_steps_line_is_explained_once_before_the_first():
    """Each on a line of its own; headers come again, the legend does not."""
    lines = reported(*range(1, HEADER_EVERY + 2))
    headers = [number for number, line in enumerate(lines) if line.strip().startswith("step  ") and "fmt_q   " in line]
    assert len(headers) == 2
    legend, names = lines[: headers[0]], re.split(r"\s{2,}", lines[headers[0]].strip())
    assert [re.split(r"\s{2,}", line)[0] for line in legend] == names
    assert all(len(re.split(r"\s{2,}", line)[1]) > 10 for line in legend)
    assert len(lines) == len(legend) + 2 + HEADER_EVERY + 1


def test_a_program_that_the_shell_finds_is_called_by_its_name(place, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(place / "trinity-vlm")])
    monkeypatch.setenv("PATH", f"/usr/bin:{place}")
    assert invocation() == "trinity-vlm"


def test_a_program_that_the_shell_does_not_find_is_called_by_its_path(place, monkeypatch):
    """The shortest from here, quoted; another one of the same name on PATH is another."""
    for started_as in (".venv/bin/trinity-vlm", str(place / "trinity-vlm")):
        monkeypatch.setattr(sys, "argv", [started_as])
        assert invocation() == ".venv/bin/trinity-vlm"
    other = place.parents[1] / "other"
    other.mkdir()
    (other / "trinity-vlm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other))
    assert invocation() == ".venv/bin/trinity-vlm"
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [str(place / "trinity-vlm")])
    assert invocation() == "./trinity-vlm"
    monkeypatch.chdir("/")
    assert invocation() == f"'{str(place / 'trinity-vlm').removeprefix('/')}'"


def test_a_module_is_called_with_the_python_that_runs_it(place, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/anywhere/trinity_vlm/__main__.py", "keys"])
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    assert invocation() == ".venv/bin/python -m trinity_vlm"
    monkeypatch.setenv("PATH", str(place))
    assert invocation() == "python -m trinity_vlm"


def test_a_library_names_the_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/lib/notebook.py"])
    assert as_typed("see `trinity-vlm keys`") == "see `trinity-vlm keys`"


def test_commands_in_errors_notes_usage_and_the_demos_last_line_are_as_typed(place, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [".venv/bin/trinity-vlm"])
    typed = ".venv/bin/trinity-vlm"
    assert main(["keys", "no such key"]) == EXIT_USER
    assert f"`{typed} keys` lists all" in capsys.readouterr().err
    assert main(["train", "tiny", "--nope"]) == EXIT_USER
    assert f"Try '{typed} train --help'" in capsys.readouterr().err
    ConsoleReporter(Console()).note("go on with `trinity-vlm resume runs/a`")
    assert f"`{typed} resume runs/a`" in capsys.readouterr().out

    with RunDirectory.create("my runs/b", load_config("tiny")) as run:
        run.append_metrics(0, {})
        with pytest.raises(KeyboardInterrupt), way_back(run, resuming(run.path, Workers())):
            raise KeyboardInterrupt
    assert f"`{typed} resume 'my runs/b'` goes on" in capsys.readouterr().err
    monkeypatch.setattr(demonstrating, "_train", lambda path, *_rest: path)
    monkeypatch.setattr(demonstrating.RunDirectory, "open", lambda path: path)
    monkeypatch.setattr(demonstrating, "save_picture", lambda path: path / "picture.png")
    monkeypatch.setattr(demonstrating, "summarise", lambda _run: Summary(0, 1, (), (), None, None, None, 0))
    assert main(["demo", "--run-dir", "my runs/a", "--no-photos"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(rf"  {typed} play 'my runs/a/picture\.png' --run 'my runs/a'$", last)


def test_the_last_line_of_a_program_off_the_path_runs_as_typed(tmp_path):
    """The shell's own word on it: the command that an error names is found from the folder it was typed in."""
    program = Path(sys.executable).with_name("trinity-vlm")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    run = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path, "check": False}
    told = subprocess.run([program, "keys", "no such key"], **run).stderr
    command = re.search(r"`(.+? keys)`", " ".join(told.split())).group(1)
    assert subprocess.run(["sh", "-c", command], **run).returncode == 0


def test_texts_name_commands_in_backquotes():
    """So that ``as_typed`` finds them; docstrings, which are help pages and comments, are free."""
    command = re.compile(rf"(.?)trinity-vlm (?:{'|'.join(COMMANDS)})\b")
    found = [(file, line, before) for file in SOURCES for line, text in texts(file) for before in command.findall(text)]
    assert len(found) >= 5
    assert [place for *place, before in found if before != "`"] == []


def texts(file):
    """(line, text) of every string of a file but its docstrings."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_a_note_is_printed_as_it_is():
    """Square brackets in a path are no markup, and a long command stays on one line, to be copied."""
    console = Console(width=40, record=True, file=io.StringIO())
    text = "see /runs/[red]first[/red]/figure.png and then the command that is far too long for this terminal"
    ConsoleReporter(console).note(text)
    assert console.export_text() == f"{text}\n"
