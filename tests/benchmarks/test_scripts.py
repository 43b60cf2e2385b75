"""Every benchmark says what it does before it does anything, also where what it measures is not installed."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[!_]*.py"))


def test_the_scripts_are_found():
    assert {"outer_step.py", "trl_grpo.py", "microcosm_speed.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_docstring(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    assert end.value.code == 0
    docstring = ast.get_docstring(ast.parse((BENCHMARKS / script).read_text()))
    assert f"benchmarks/{script}" in docstring
    assert " ".join(docstring.split()) in " ".join(capsys.readouterr().out.split())
