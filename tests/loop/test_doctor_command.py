"""`trinity-vlm doctor` says what fits before anything is loaded, and exits accordingly."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trinity_vlm import fitting, machine
from trinity_vlm.cli import doctoring
from trinity_vlm.cli.main import EXIT_FAILURE, EXIT_USER, main
from trinity_vlm.config import load_config
from trinity_vlm.errors import TrainingError
from trinity_vlm.machine import EXTRAS, REQUIRED, UNKNOWN, VLLM, Gpu, Package, find_compiler, inspect_machine

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
ONE_8B = ["--preset", "qwen3-vl-8b"]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ())


def told(capsys, *arguments):
    """Exit code and everything printed, line breaks of wrapping undone."""
    code = main(["doctor", *arguments])
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


def test_without_a_preset_the_machine_is_described(capsys):
    code, text = told(capsys)
    assert code == 0
    assert all(name in text for name in (*REQUIRED, "GPU", "CPU", "disk"))
    assert "memory plan" not in text


@pytest.mark.parametrize("arguments", [ONE_8B, ["qwen3-vl-8b"], ["qwen2.5-vl-7b"]])
def test_a_presets_model_is_planned_without_hub_or_files(capsys, no_gpu, arguments):
    """The built-in shape is used, and said to be."""
    code, text = told(capsys, *arguments, "--gpu-gib", "141")
    assert code == 0
    assert "its built-in shape is used" in text
    assert "it fits" in text


def test_a_card_that_is_too_small_ends_with_1_and_settings_that_help(capsys):
    code, text = told(capsys, *ONE_8B, "--gpu-gib", "50", "engine.kind=openai",
                      "engine.servers={urls: [http://a:1], model: m}", "update.gradient_checkpointing=off")  # fmt: skip
    assert code == EXIT_FAILURE
    assert "GiB too much" in text
    assert "instead update.gradient_checkpointing=auto" in text


def test_a_cache_too_small_for_one_sequence_is_told_as_such(capsys):
    """With the sizes and what to set; nothing is too much, least of all less than nothing."""
    code, text = told(capsys, *ONE_8B, "--gpu-gib", "139.8", "engine.kind=vllm", "engine.vllm.kv_cache_gib=2")
    assert code == EXIT_FAILURE
    assert "engine.vllm.kv_cache_gib=2 does not hold one sequence of model.context=20480" in text
    assert "it takes 2.82 GiB" in text
    assert "too much" not in text
    assert "instead engine.vllm.kv_cache_gib=40.5" in text


def test_a_small_cache_that_nobody_set_is_told_as_unset(capsys, no_gpu, monkeypatch):
    """On a CPU it is 1 GiB."""
    monkeypatch.setattr(doctoring, "CPU_PARAMETERS", 1e12)
    _, text = told(capsys, *ONE_8B, "engine.kind=vllm")
    assert "engine.vllm.kv_cache_gib is unset, 1 GiB on a CPU: that does not hold one sequence" in text


def test_settings_that_help_are_told_as_alternatives(capsys):
    """Only where there are several; each alone makes that difference."""
    _, text = told(capsys, *ONE_8B, "engine.kind=vllm", "--gpu-gib", "80")
    assert "faster model.max_pixels=262144 or roles.policy_tokens=6144 or images.per_step=8 each of these 3" in text
    assert "each of these 3 lines is enough by itself verdict it fits" in text
    _, text = told(capsys, *ONE_8B, "--gpu-gib", "50", "update.gradient_checkpointing=off", "engine.kind=vllm")
    assert "instead update.gradient_checkpointing=auto" in text
    assert "enough by itself" not in text


def test_the_help_says_what_is_counted_smaller(capsys):
    code, text = told(capsys, "--help")
    text = " ".join(text.replace("│", " ").split())
    assert code == 0
    assert "everything at its largest" not in text
    assert "a quarter of their token budgets" in text
    assert "every layer were recomputed" in text


def test_workers_share_the_images(capsys, no_gpu):
    """A GPU of 80 GiB is tight for one worker and not for one of eight; 16 images can't be shared by three."""
    vllm = (*ONE_8B, "engine.kind=vllm", "--gpu-gib", "80")
    assert "slower the cache holds less" in told(capsys, *vllm)[1]
    assert "slower" not in told(capsys, *vllm, "--workers", "8")[1]
    code, text = told(capsys, *vllm, "--workers", "3")
    assert code == EXIT_USER
    assert "images.per_step=16 can't be shared by 3 workers; use a multiple of 3" in text


def test_workers_are_planned_for_the_fullest_of_their_gpus_and_share_the_cpu(capsys, monkeypatch):
    gpus = (Gpu("First", 139.8, 139.0), Gpu("Second", 139.8, 90.0), Gpu("Third", 139.8, 10.0))
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    assert "device First, 139.0" in told(capsys, *ONE_8B)[1]
    assert "device Second, 90.0" in told(capsys, *ONE_8B, "--workers", "2")[1]
    main(["doctor", "tiny", "model.device=cpu", "--workers", "2", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["memory_gib"] == answer["machine"]["free_memory_gib"] / 2


VLLM_ONLY = ("update.compile_layers=false", "engine.kind=vllm")


@pytest.mark.parametrize(
    ("overrides", "gpus", "reason", "way_out"),
    [
        ((), (Gpu("Imagined", 139.8, 139.0),), "update.compile_layers=true", "update.compile_layers=false"),
        (VLLM_ONLY, (Gpu("Imagined", 139.8, 139.0),), "engine.kind=vllm", "engine.kind=transformers"),
        (
            ("engine.kind=vllm",),
            (Gpu("Imagined", 139.8, 139.0),),
            "update.compile_layers=true and engine.kind=vllm",
            "update.compile_layers=false engine.kind=transformers",
        ),
        (("update.compile_layers=false",), (Gpu("Imagined", 139.8, 139.0),), None, None),
        (("model.device=cpu", "engine.kind=vllm"), (Gpu("Imagined", 139.8, 139.0),), None, None),
        (("engine.kind=vllm",), (), None, None),
    ],
)
def test_a_missing_compiler_is_a_problem_of_what_needs_one_on_a_gpu(
    capsys, monkeypatch, overrides, gpus, reason, way_out
):
    """Compiled layers, and vLLM in any case; told by the doctor, and by a run before it starts."""
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(fitting, "current_gpu", lambda: gpus[0] if gpus else None)
    config = load_config("tiny", overrides)
    fitting.check_compiler(config)
    assert "C compiler" not in told(capsys, "tiny", *overrides)[1]
    monkeypatch.setattr(machine, "find_compiler", lambda: None)
    monkeypatch.setattr(fitting, "find_compiler", lambda: None)
    code, text = told(capsys, "tiny", *overrides)
    assert "compiler none" in text
    if reason is None:
        assert "install a C compiler" not in text
        fitting.check_compiler(config)
        return
    assert f"problem {reason}: on a GPU Triton needs a C compiler" in text
    assert f"install a C compiler such as gcc, or set {way_out} " in text
    assert code == EXIT_FAILURE
    with pytest.raises(TrainingError, match=f"^{reason}: .* install a C compiler such as gcc, or set {way_out}$"):
        fitting.check_compiler(config)


def test_the_compiler_is_the_one_that_triton_takes(monkeypatch, tmp_path):
    """$CC before all, be it there or not; then gcc, then clang."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() is None
    for name in ("clang", "gcc", "mine"):
        (tmp_path / name).touch(mode=0o755)
        if name == "mine":
            monkeypatch.setenv("CC", name)
        assert find_compiler() == str(tmp_path / name)
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert find_compiler() is None


def test_without_a_gpu_a_large_model_is_planned_for_an_imagined_one(capsys, no_gpu):
    code, text = told(capsys, *ONE_8B)
    assert code == EXIT_FAILURE
    assert "a GPU of 80 GiB, for there is none here" in text
    assert "no GPU here" in text


def test_without_a_gpu_the_tiny_model_runs_on_the_cpu(capsys, no_gpu):
    code, text = told(capsys, "tiny")
    assert code == 0
    assert "device the CPU" in text
    assert "float32" in text


def test_the_gpu_that_is_here_is_planned_for(capsys, monkeypatch):
    """What others hold of it does not count as free."""
    monkeypatch.setattr(machine, "gpus", lambda: (Gpu("Imagined H200", 139.8, 30.0),))
    code, text = told(capsys, *ONE_8B)
    assert code == EXIT_FAILURE
    assert "device Imagined H200, 30.0 of 139.8 GiB free" in text


def test_vllm_that_is_not_installed_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(machine, "found", lambda modules: "vllm" not in modules)
    monkeypatch.setattr(machine, "gpus", lambda: (Gpu("Imagined H200", 139.8, 139.0),))
    code, text = told(capsys, *ONE_8B, "engine.kind=vllm")
    assert code == EXIT_FAILURE
    assert "pip install -e '.[vllm]'" in text
    assert "verdict it would fit, but for the problem above" in text


def test_several_problems_are_counted(capsys, monkeypatch, no_gpu):
    monkeypatch.setattr(machine, "found", lambda modules: not {"vllm", "wandb", "trackio"} & set(modules))
    wanted = (*ONE_8B, "engine.kind=vllm", "tracking.trackers=[wandb, trackio]")
    _, text = told(capsys, *wanted)
    assert text.count("problem ") == 4
    assert "verdict it would fit, but for the 4 problems above" in text


def test_a_gpu_that_is_asked_for_and_not_here_is_refused_as_by_a_run(capsys, monkeypatch):
    """It once fitted, on the CPU; for another machine's GPU nothing is asked of this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = told(capsys, "tiny", "model.device=cuda")
    assert (code, "torch sees no GPU" in text) == (EXIT_USER, True)
    assert told(capsys, "tiny", "model.device=cuda", "--gpu-gib", "80")[0] == 0


def test_another_machine_is_not_judged_by_what_is_installed_here(capsys, monkeypatch, no_gpu):
    """Planned on a laptop for a server's card: fits or not, whatever this machine lacks."""
    monkeypatch.setattr(machine, "found", lambda modules: "vllm" not in modules)
    code, text = told(capsys, *ONE_8B, "engine.kind=vllm", "--gpu-gib", "139")
    assert (code, "verdict it fits" in text) == (0, True)
    code, text = told(capsys, *ONE_8B, "engine.kind=vllm", "--gpu-gib", "24")
    assert (code, "verdict it does not fit" in text) == (EXIT_FAILURE, True)


def test_json_says_the_same(capsys, no_gpu):
    assert main(["doctor", *ONE_8B, "engine.kind=vllm", "--gpu-gib", "80", "--json"]) in (0, EXIT_FAILURE)
    answer = json.loads(capsys.readouterr().out)
    plan = answer["plan"]
    assert plan["total_gib"] == pytest.approx(sum(part["gib"] for part in plan["parts"]))
    assert plan["cache"]["bytes_per_token"] == 147_456
    assert plan["built_in_shape"] is True
    assert answer["ok"] is not bool(plan["problems"])
    assert {package["name"] for package in answer["machine"]["packages"]} >= set(REQUIRED)


def test_an_unreadable_model_is_named_after_the_machine(capsys):
    code, text = told(capsys, "tiny", "model.path=/no/such/model")
    assert code == EXIT_USER
    assert text.index("this machine") < text.index("model.path='/no/such/model'")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["huge"], "qwen3-vl-8b"),
        (["tiny", "roles.candidats=3"], "did you mean roles.candidates"),
        (["steps=3"], "name the preset"),
        (["tiny", "qwen3-vl-8b"], "one preset or file"),
        (["tiny", "--preset", "qwen3-vl-8b"], "one preset or file"),
        (["tiny", "--gpu-gib", "0"], "--gpu-gib"),
    ],
)
def test_usage_errors_end_with_2(capsys, arguments, expected):
    code, text = told(capsys, *arguments)
    assert code == EXIT_USER
    assert expected in text


def test_no_line_is_wider_than_the_terminal(capsys, no_gpu):
    main(["doctor", *ONE_8B, "engine.kind=vllm"])
    assert max(len(line.rstrip()) for line in capsys.readouterr().out.splitlines()) <= 80


def test_the_oldest_versions_are_those_of_the_package():
    """pyproject.toml and the doctor name the same ones, and every extra that does something."""
    needs = dict(line.split(">=") for line in PROJECT["dependencies"] if ">=" in line)
    assert {name: oldest for name, (oldest, _) in REQUIRED.items() if name != "python"} == {
        name: needs[name] for name in REQUIRED if name != "python"
    }
    assert PROJECT["requires-python"] == f">={REQUIRED['python'][0]}"
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm>={VLLM[0]}"]
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys() - {"dev", "ray", "eval"}, "nothing uses those yet"


@pytest.mark.parametrize(
    ("version", "works", "remark"),
    [
        ("2.11.0+cu130", True, "ok"),
        ("2.13.0+cpu", True, "ok"),
        ("2.9.1", False, "too old: pip install 'torch>=2.11'"),
        ("2.14.0", True, "newer than 2.13"),
        ("3.0", True, "newer than 2.13"),
        (None, False, "missing: pip install 'torch>=2.11'"),
        (UNKNOWN, True, "ok"),
    ],
)
def test_versions_are_compared_as_numbers(version, works, remark):
    package = Package("torch", version, "2.11", "2.13")
    assert package.works is works
    assert remark in package.remark


def test_an_old_package_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(machine, "_version", lambda name: "1.0")
    code, text = told(capsys)
    assert code == EXIT_FAILURE
    assert "too old" in text


def test_a_small_shared_memory_is_warned_of(tmp_path):
    """A container's default of 64 MiB."""
    found = inspect_machine(tmp_path / "not" / "there")
    assert found.disk_gib > 0
    assert "--shm-size" in replace(found, shared_memory_gib=0.0625).warnings[0]
    assert replace(found, shared_memory_gib=None).warnings == ()
