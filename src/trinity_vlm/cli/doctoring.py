"""``trinity-vlm doctor``: what this machine can run, told before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trinity_vlm.config import Config, load_config
from trinity_vlm.errors import ConfigError
from trinity_vlm.machine import Machine, inspect_machine
from trinity_vlm.memory_plan import MemoryPlan, Verdict, plan_memory, small_cache
from trinity_vlm.model_shapes import ModelShape

IMAGINED_GPU_GIB = 80.0
CPU_PARAMETERS = 1e9
"""Above this a step on a CPU takes hours."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A configuration on a machine. ``problems``: why it can't run as it stands, each with what to do.

    device: what the plan is for, in words; built_in: no config was read, the shape is the known one of the hub id
    """

    shape: ModelShape
    built_in: bool
    device: str
    plan: MemoryPlan
    problems: tuple[str, ...]


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PRESET|CONFIG.yaml] [KEY=VALUE]...", help="what to plan for, and settings to change"),
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="the same as a first argument")] = None,
    gpu_gib: Annotated[
        float | None, typer.Option("--gpu-gib", min=1, help="plan for a GPU of this size instead of the one here")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="processes that share images.per_step, each with a GPU")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Tell what this machine has and, given a preset or file, whether that run fits one GPU. No weights are loaded.

        trinity-vlm doctor                                     this machine
        trinity-vlm doctor qwen3-vl-8b engine.kind=vllm        a run on its GPU
        trinity-vlm doctor --preset qwen3-vl-8b --gpu-gib 80   on another GPU
        trinity-vlm doctor qwen3-vl-8b --workers 8             one of eight workers
        trinity-vlm doctor my.yaml images.per_step=8           other settings

    The plan counts weights, adapters and the longest micro-batch in full, and
    all at once. Two things are counted smaller, for a run gets by with less:
    vLLM's cache is planned for completions of a quarter of their token budgets
    (where more are under way, some wait), and activations as if every layer
    were recomputed, unless update.gradient_checkpointing=off. Where it does
    not fit, the plan names settings that make it fit.

    Exits with 0 when all is well, with 1 when this machine lacks something or
    the run does not fit, with 2 when the command line, a setting or a file
    that it names is at fault. `train ... dry_run=true` ends alike.
    """
    if gpu_gib is not None and not math.isfinite(gpu_gib):
        raise typer.BadParameter(f"{gpu_gib} is no size of a GPU; give GiB, for example 80", param_hint="--gpu-gib")
    source, overrides = _split(preset, arguments or [])
    config = None if source is None else load_config(source, overrides)
    machine, diagnosis = examine(config, Console(quiet=as_json), gpu_gib, workers)
    if as_json:
        print(json.dumps(_as_json(machine, diagnosis), indent=1))
    if not all_well(machine, diagnosis):
        raise typer.Exit(1)


def examine(
    config: Config | None, console: Console, gpu_gib: float | None = None, workers: int = 1
) -> tuple[Machine, Diagnosis | None]:
    """Look at this machine and, where there is a configuration, at how its run fits; both are printed.

    Raises ModelLoadError and ConfigError as ``diagnose`` does, after the machine was printed.
    """
    machine = inspect_machine(Path(config.run_dir if config and config.run_dir else "runs"))
    show_machine(machine, console)
    if config is None:
        return machine, None
    diagnosis = diagnose(config, machine, gpu_gib, workers)
    show_diagnosis(diagnosis, console)
    return machine, diagnosis


def all_well(machine: Machine, diagnosis: Diagnosis | None) -> bool:
    """Whether the machine lacks nothing and the run, where one was examined, has no problem."""
    return machine_works(machine) and not (diagnosis and diagnosis.problems)


def diagnose(config: Config, machine: Machine, gpu_gib: float | None, workers: int = 1) -> Diagnosis:
    """Plan one worker for a GPU of ``gpu_gib``, else for the one here, else for the CPU or an imagined GPU.

    Raises ModelLoadError when the model's config is neither here nor on the hub, nor its shape built in, or when
    model.device=cuda and no GPU is here; ConfigError when the workers can't share a step's images.
    """
    from trinity_vlm.backbone.loading import choose_device
    from trinity_vlm.backbone.shapes import read_shape
    from trinity_vlm.fitting import check_share

    check_share(config, workers)
    if gpu_gib is None:  # else it is about another machine
        choose_device(config.model)
    shape, built_in = read_shape(config.model, config.lora, fetch=True)
    device, memory, on_gpu = _device(config, machine, shape, gpu_gib, workers)
    plan = plan_memory(config, shape, memory, on_gpu=on_gpu, workers=workers)
    problems = [*_problems_of_plan(config, plan)]
    if gpu_gib is None:
        problems += _problems_of_machine(config, machine, absent=on_gpu and not machine.gpus)
    return Diagnosis(shape, built_in, device, plan, tuple(problems))


def _device(
    config: Config, machine: Machine, shape: ModelShape, gpu_gib: float | None, workers: int
) -> tuple[str, float, bool]:
    """In words, its GiB for one of ``workers``, and whether it is a GPU: of several the one with the least memory."""
    if gpu_gib is not None:
        return f"a GPU of {gpu_gib:g} GiB", gpu_gib, True
    if machine.gpus and config.model.device != "cpu":
        gpu = min(machine.gpus[:workers], key=lambda gpu: gpu.free_gib)
        return f"{gpu.name}, {gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free", gpu.free_gib, True
    if config.model.device == "cpu" or shape.parameters <= CPU_PARAMETERS:
        shared = f", shared by {workers} workers" if workers > 1 else ""
        return (
            f"the CPU, {machine.free_memory_gib:.1f} of {machine.memory_gib:.1f} GiB free{shared}",
            machine.free_memory_gib / workers,
            False,
        )
    return (
        f"a GPU of {IMAGINED_GPU_GIB:g} GiB, for there is none here (--gpu-gib: another size)",
        IMAGINED_GPU_GIB,
        True,
    )


def _problems_of_plan(config: Config, plan: MemoryPlan) -> Iterator[str]:
    if plan.excess_gib:
        way_out = "" if plan.advice else "; take a smaller model or a larger GPU"
        yield f"{_size(plan.excess_gib)} too much{way_out}"
    if plan.missing_cache_gib:
        yield small_cache(config, plan)


def _problems_of_machine(config: Config, machine: Machine, *, absent: bool) -> Iterator[str]:
    from trinity_vlm.fitting import lacks_compiler

    if machine.gpus and machine.compiler is None and (problem := lacks_compiler(config)):
        yield problem
    if absent:
        yield "no GPU here: a model of this size needs one"
    installed = {package.name for package in machine.packages}
    if config.engine.kind == "vllm" and "vllm" not in installed:
        yield "engine.kind=vllm: not installed; pip install -e '.[vllm]' in this checkout, or engine.kind=transformers"
    yield from (
        f"tracking.trackers names {tracker}: not installed; pip install 'trinity-vlm[{tracker}]'"
        for tracker in config.tracking.trackers
        if tracker in dict(machine.missing_extras)
    )


def machine_works(machine: Machine) -> bool:
    """Whether every package that must be there is, in a version that works."""
    return all(package.works for package in machine.packages)


def show_machine(machine: Machine, console: Console) -> None:
    """Print what the machine has."""
    table = Table("package", "installed", "known to work", "", title="this machine", title_justify="left")
    for package in machine.packages:
        style = "" if package.remark == "ok" else "yellow" if package.works else "red"
        table.add_row(
            package.name, package.version or "-", f"{package.oldest} .. {package.newest}", package.remark, style=style
        )
    console.print(table)
    for gpu in machine.gpus:
        _line(console, "GPU", f"{gpu.name}, {gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free")
    if not machine.gpus:
        _line(console, "GPU", "none that torch sees")
    _line(
        console, "CPU", f"{machine.cpu_cores} cores, {machine.free_memory_gib:.1f} of {machine.memory_gib:.1f} GiB free"
    )
    if machine.shared_memory_gib is not None:
        _line(console, "/dev/shm", f"{machine.shared_memory_gib:.1f} GiB")
    _line(console, "disk", f"{machine.disk_gib:.1f} GiB free at {machine.disk_path}")
    _line(console, "compiler", machine.compiler or "none; on a GPU update.compile_layers and vLLM need one")
    for name, purpose in machine.missing_extras:
        _line(console, "extra", f"{name} is not installed; it brings {purpose}")
    for warning in machine.warnings:
        _line(console, "warning", warning, "yellow")


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the plan, the verdict and what helps."""
    shape, plan = diagnosis.shape, diagnosis.plan
    console.print()
    if diagnosis.built_in:
        _line(console, "note", f"the config of {shape.name} is not here; its built-in shape is used")
    table = Table("part", "GiB", "", title=f"memory plan: {escape(shape.name)}", title_justify="left")
    table.columns[1].justify = "right"
    for part in plan.parts:
        table.add_row(part.name, f"{part.gib:.2f}", escape(part.note), style="" if part.gib >= 0.005 else "dim")
    table.add_section()
    table.add_row("all together", f"{plan.total_gib:.2f}", f"{plan.budget_gib:.2f} may be filled", style="bold")
    console.print(table)
    _line(console, "device", diagnosis.device)
    need = plan.cache
    _line(
        console,
        "cache",
        f"a sequence of model.context takes {_size(need.one_sequence)}; a step's requests take {_size(need.typical)} "
        f"with a quarter of their token budgets, {_size(need.worst)} with all",
    )
    _show_verdict(diagnosis, console)


def _show_verdict(diagnosis: Diagnosis, console: Console) -> None:
    plan = diagnosis.plan
    for problem in diagnosis.problems:
        _line(console, "problem", problem, "bold red")
    if plan.verdict is Verdict.TIGHT:
        _line(console, "slower", "the cache holds less than a typical step's requests: some wait for others", "yellow")
    first = "instead" if plan.verdict is Verdict.TOO_LARGE else "faster"
    for number, setting in enumerate(plan.advice):
        _line(console, "or" if number else first, setting)
    if len(plan.advice) > 1:
        _line(console, "", f"each of these {len(plan.advice)} lines is enough by itself")
    if not diagnosis.problems:
        _line(console, "verdict", "it fits", "bold green")
    elif plan.verdict is Verdict.TOO_LARGE:
        _line(console, "verdict", "it does not fit", "bold red")
    else:
        number = len(diagnosis.problems)
        above = "the problem above" if number == 1 else f"the {number} problems above"
        _line(console, "verdict", f"it would fit, but for {above}", "bold yellow")


def _size(gib: float) -> str:
    """``40.5 -> "40.5 GiB"``, ``0.002 -> "2 MiB"``"""
    return f"{gib:.1f} GiB" if gib >= 0.95 else f"{1024 * gib:.0f} MiB"


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    grid.add_row(f"[dim]{label}[/]", escape(text), style=style)
    console.print(grid)


def _split(preset: str | None, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Preset or file, and overrides; raises ConfigError for two of the former, or overrides of nothing."""
    sources = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    sources = sources if preset is None else [preset, *sources]
    if len(sources) > 1:
        raise ConfigError(f"doctor plans for one preset or file, not for {' and '.join(map(repr, sources))}")
    if overrides and not sources:
        raise ConfigError(f"doctor {overrides[0]}: name the preset or file that it changes")
    return (sources[0] if sources else None), overrides


def _as_json(machine: Machine, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Every field under its own name, sizes in GiB."""
    packages = [{**asdict(package), "remark": package.remark} for package in machine.packages]
    answer: dict[str, Any] = {
        "machine": {
            **asdict(machine),
            "packages": packages,
            "missing_extras": dict(machine.missing_extras),
            "warnings": machine.warnings,
        }
    }
    if diagnosis is not None:
        plan = diagnosis.plan
        answer["plan"] = {
            "model": diagnosis.shape.name,
            "built_in_shape": diagnosis.built_in,
            "device": diagnosis.device,
            **asdict(plan),
            "total_gib": plan.total_gib,
            "budget_gib": plan.budget_gib,
            "problems": diagnosis.problems,
        }
    answer["ok"] = all_well(machine, diagnosis)
    return answer
