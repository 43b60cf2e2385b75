"""Does the run that a configuration describes fit the GPU it would run on? Asked before weights are loaded."""

from __future__ import annotations

from pathlib import Path

from trinity_vlm.backbone.shapes import read_shape
from trinity_vlm.config import Config
from trinity_vlm.errors import ConfigError, ModelLoadError, TrainingError
from trinity_vlm.machine import Gpu, current_gpu, find_compiler, host_capacity_gib
from trinity_vlm.memory_demand import GIB, Demand
from trinity_vlm.memory_plan import MemoryPlan, plan_memory, planned_kv_gib, small_cache
from trinity_vlm.model_shapes import ModelShape, known_shape

REFUSED_ABOVE = 1.15
"""A plan over the GPU's memory by less than this may still run: some of its parts are estimates of the worst case."""


def check_share(config: Config, workers: int) -> None:
    """Raise ConfigError when ``workers`` processes can't share ``images.per_step`` equally."""
    if config.images.per_step % workers:
        raise ConfigError(
            f"images.per_step={config.images.per_step} can't be shared by {workers} workers; use a multiple of "
            f"{workers}"
        )


def check_capacity(config: Config) -> None:
    """Raise TrainingError when the base weights alone exceed all memory of the device that they would be loaded to.

    Asked of the presets' models only, whose sizes are known without a hub; anything else might fit, quantized or
    smaller than it seems. A GPU's memory that others hold now, and swap, count as if they were free.
    """
    shape = known_shape(config.model.path, "all-linear")
    if shape is None or Path(config.model.path).expanduser().is_dir():  # a folder of that name goes before the hub
        return
    gpu = None if config.model.device == "cpu" else current_gpu()
    demand = Demand(config, shape, on_gpu=gpu is not None)
    weights = shape.parameters * demand.dtype_bytes / GIB
    memory = host_capacity_gib() if gpu is None else gpu.total_gib
    if weights > memory:
        place = f"{gpu.name} has" if gpu else "this machine, without a GPU to be used, has"
        other = "a larger GPU" if gpu else "a machine with a GPU (and model.device=auto)"
        raise TrainingError(
            f"model.path={config.model.path!r}: its weights alone take {weights:.1f} GiB in {demand.dtype}, {place} "
            f"{memory:.1f} GiB of memory. Take {other} or a smaller model; "
            "`trinity-vlm doctor` shows the plan of a run"
        )


def check_plan(config: Config, workers: int = 1) -> None:
    """Raise TrainingError, naming settings that help, when a run with vLLM exceeds its GPU by more than 15 %, or when
    its ``engine.vllm.kv_cache_gib`` holds less than one sequence of ``model.context``.

    Nothing is said about other engines, machines without a GPU, and models whose config is not here yet.

    workers: processes that share ``images.per_step``, each with a GPU
    """
    if config.engine.kind != "vllm" or (found := _gpu_and_shape(config)) is None:
        return
    gpu, shape = found
    plan = plan_memory(config, shape, gpu.free_gib, workers=workers)
    if plan.total_gib > REFUSED_ABOVE * gpu.free_gib:
        raise TrainingError(_too_large(plan, gpu))
    if plan.missing_cache_gib:
        raise TrainingError(f"{small_cache(config, plan)}. {_what_fits(plan)}")


def check_compiler(config: Config) -> None:
    """Raise TrainingError when the run would find no C compiler on a machine with a GPU, and needs one."""
    if (problem := lacks_compiler(config)) and current_gpu() is not None and find_compiler() is None:
        raise TrainingError(problem)


def lacks_compiler(config: Config) -> str | None:
    """What to say of a run on a GPU without a C compiler; None where the run needs none.

    Triton compiles a small C module to launch its kernels: those of compiled layers, and vLLM's own, which it has for
    adapters even with ``engine.vllm.enforce_eager``.
    """
    ways_out = {}
    if config.update.compile_layers:
        ways_out["update.compile_layers=true"] = "update.compile_layers=false"
    if config.engine.kind == "vllm":
        ways_out["engine.kind=vllm"] = "engine.kind=transformers"
    if not ways_out or config.model.device == "cpu":
        return None
    return (
        f"{' and '.join(ways_out)}: on a GPU Triton needs a C compiler to launch its kernels, and there is none ($CC "
        f"if it is set, else gcc or clang); install a C compiler such as gcc, or set {' '.join(ways_out.values())}"
    )


def with_planned_cache(config: Config, workers: int = 1) -> Config:
    """The configuration with ``engine.vllm.kv_cache_gib`` set: to what the plan leaves for it, where it was unset.

    To be asked before anything of the run is on the GPU. Unchanged for other engines and where there is nothing to plan
    with: no GPU, or a model whose config is not here yet. ``workers`` as for ``check_plan``.
    """
    vllm = config.engine.vllm
    if config.engine.kind != "vllm" or vllm.kv_cache_gib is not None or (found := _gpu_and_shape(config)) is None:
        return config
    gpu, shape = found
    size = planned_kv_gib(config, shape, gpu.free_gib, workers=workers)
    planned = vllm.model_copy(update={"kv_cache_gib": size})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"vllm": planned})})


def _gpu_and_shape(config: Config) -> tuple[Gpu, ModelShape] | None:
    gpu = None if config.model.device == "cpu" else current_gpu()
    if gpu is None:
        return None
    try:
        return gpu, read_shape(config.model, config.lora, fetch=False)[0]
    except ModelLoadError:
        return None


def _too_large(plan: MemoryPlan, gpu: Gpu) -> str:
    biggest = sorted(plan.parts, key=lambda part: part.gib, reverse=True)[:3]
    parts = ", ".join(f"{part.name} {part.gib:.1f}" for part in biggest)
    return (
        f"engine.kind=vllm: the run needs about {plan.total_gib:.0f} GiB of GPU memory ({parts}); {gpu.name} has "
        f"{gpu.free_gib:.0f} of {gpu.total_gib:.0f} GiB free. {_what_fits(plan)}"
    )


def _what_fits(plan: MemoryPlan) -> str:
    advice = " or ".join(plan.advice) or "a smaller model or a larger GPU"
    return f"What fits: {advice}. `trinity-vlm doctor` shows the plan"
