"""Seconds of the paper's 8B outer step on one GPU, by phase, beside what the hardware allows.

    python benchmarks/eight_billion.py /dev/shm/qwen3-vl-8b
    python benchmarks/outer_step.py --model /dev/shm/qwen3-vl-8b --steps 3 --out step.json [KEY=VALUE ...]
    python benchmarks/outer_step.py --model ... --plan fixed,fixed,tail/on,tail/off,double   # several in one process
    python benchmarks/outer_step.py --model ... --layout paper                  # phase barriers and weight swaps
    python benchmarks/outer_step.py --model ... --layout paper --sub-batch 2 --images 4
    python benchmarks/outer_step.py --model DIR --rehearse [engine.kind=transformers]   # a tiny model, a CPU

The product's own ``assemble`` and ``outer_step`` with the preset qwen3-vl-8b: 16 images of 625 or 650 tokens, G = 4,
K = 4, the paper's prompts, every image selected and every rollout retained. The model has random weights, so lengths
are forced (Questioner 1,024, Solver 2,048, Verifier 512 tokens; with vLLM exactly so) and texts are exchanged for
recorded ones (``_recorded.py``); Verifier calls run without their schemas, which would end them early. Each step has
images of its own. The first step is a warm-up: it compiles. ``_roofline.py`` has the formulas of the bounds.

A plan names its steps: ``fixed`` lengths, ``double`` ones, or ``tail``: log-normal ones with the means of ``fixed``,
the same in every such step. ``/on`` and ``/off`` set ``update.overlap`` for the step. With ``--iterations`` each step
also says what vLLM's iterations took while its episodes ran, by how many sequences they served, and how much of that
time lies in none.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _gpu import GpuWatch
from _iterations import LOGGING, Iterations
from _recorded import Lengths, Sample, Tape, recorded
from _roofline import (
    Machine,
    Shape,
    decode_seconds,
    longest_chain,
    prefill_flops,
    steps_in_flight,
    update_flops,
)
from PIL import Image
from torch._dynamo.utils import calculate_time_spent, counters

from trinity_vlm import assembly
from trinity_vlm.assembly import System, assemble
from trinity_vlm.config import Config, load_config
from trinity_vlm.engine.paper_layout import PaperLayoutEngine
from trinity_vlm.engine.vllm import engine as vllm_engine
from trinity_vlm.loop import outer_step
from trinity_vlm.preflight import check_that_the_engine_agrees
from trinity_vlm.recording import Silent, StepResult
from trinity_vlm.types import CallType

TOKENS = {"policy_question": 1024, "policy_solution": 2048, "verifier": 512}
SIZES = ((800, 800), (832, 800))
REHEARSAL = (
    "roles.prompts=short",
    "model.min_pixels=65536",
    "model.context=4096",
    "roles.policy_tokens=2048",
    "roles.verifier_tokens=2048",
)
Row = dict[str, Any]


class Notes(Silent):
    """Prints what the product's own checks say."""

    def note(self, text: str) -> None:
        print(text, flush=True)


def forced_lengths(kind: str, scale: float) -> Lengths:
    """Mean lengths of every kind of call in a step of the plan."""
    factor = scale * (2 if kind == "double" else 1)
    scaled = {name: max(2, round(tokens * factor)) for name, tokens in TOKENS.items()}
    means = dict.fromkeys(CallType, scaled["verifier"])
    means |= {CallType.PROPOSE: scaled["policy_question"], CallType.SOLVE: scaled["policy_solution"]}
    return Lengths(means, tail=kind == "tail")


@dataclass(frozen=True, slots=True)
class Planned:
    """One step of a plan: ``KIND[/on|/off][#SUB_BATCH][@IMAGES]``, for example ``tail/on`` or ``fixed#2@2``."""

    name: str
    kind: str
    overlap: str | None
    sub_batch: int | None
    images: int

    @classmethod
    def read(cls, name: str, images: int) -> Planned:
        """Raises SystemExit for anything else."""
        found = re.fullmatch(r"(fixed|double|tail)(?:/(on|off))?(?:#(\d+))?(?:@(\d+))?", name)
        if found is None:
            raise SystemExit(
                f"--plan: {name!r} is not fixed, double or tail with /on, /off, #SUB_BATCH, @IMAGES behind"
            )
        kind, overlap, sub_batch, own = found.groups()
        return cls(name, kind, overlap, int(sub_batch) if sub_batch else None, int(own or images))

    def arrange(self, system: System, config: Config) -> None:
        """Change what differs between steps, which a run never does."""
        update = config.update.model_copy(update={"overlap": self.overlap or config.update.overlap})
        images = config.images.model_copy(update={"per_step": self.images})
        system.config = config.model_copy(update={"update": update, "images": images})
        if isinstance(system.engine, PaperLayoutEngine):
            system.engine.sub_batch = self.sub_batch or config.engine.sub_batch


def planned(args: argparse.Namespace) -> list[Planned]:
    """The steps to run."""
    names = args.plan.split(",") if args.plan else ["tail" if args.tail else "fixed"] * args.steps
    return [Planned.read(name, args.images) for name in names]


def write_images(folder: Path, count: int, rehearse: bool) -> None:
    """Distinct noise pictures, as coarse as they may be for small files."""
    generator = np.random.default_rng(0)
    for i in range(count):
        noise = Image.fromarray(generator.integers(0, 255, (50, 50, 3), dtype=np.uint8))
        size = (256, 256) if rehearse else SIZES[i % len(SIZES)]
        noise.resize(size, Image.Resampling.NEAREST).save(folder / f"{i:04d}.png")


def make_config(args: argparse.Namespace, folder: Path) -> Config:
    """The preset with this run's options."""
    overrides = [f"model.path={args.model}", f"images.source={folder}", f"images.per_step={args.images}"]
    overrides += ["engine.kind=vllm", "evaluation.source=null"]
    options = {"engine.layout": args.layout, "engine.sub_batch": args.sub_batch, "update.overlap": args.overlap}
    overrides += [f"{key}={value}" for key, value in options.items() if value is not None]
    return load_config("qwen3-vl-8b", [*overrides, *(REHEARSAL if args.rehearse else ()), *args.overrides])


@contextmanager
def recording(overrides: Mapping[str, Any]) -> Iterator[list[type[Any]]]:
    """Within the block ``assemble`` builds engines that force lengths and exchange texts, and vLLM ends no completion
    of its own accord."""
    engines = [recorded(getattr(assembly, name), overrides) for name in ("VllmEngine", "TransformersEngine")]
    arguments = vllm_engine.sampling_arguments

    def endless(*positional: Any, **named: Any) -> dict[str, Any]:
        return arguments(*positional, **named) | {"stop_token_ids": [], "ignore_eos": True}

    with ExitStack() as stack:
        for name, engine in zip(("VllmEngine", "TransformersEngine"), engines, strict=True):
            stack.enter_context(mock.patch.object(assembly, name, engine))
        stack.enter_context(mock.patch.object(vllm_engine, "sampling_arguments", endless))
        yield engines


def measured_step(system: System, step: int, tape: Tape, watch: GpuWatch, machine: Machine) -> Row:
    """One outer step with everything that can be said about it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    swap_seconds, swaps = _swaps(system)
    before = _hidden_costs()
    start = time.perf_counter()
    result = outer_step(system, step)
    seconds = time.perf_counter() - start
    row: Row = {"seconds": seconds} | _phases(result, tape.samples, start)
    row |= {f"metrics/{key}": value for key, value in sorted(result.metrics.items()) if _worth_printing(key)}
    after, swaps_after = _swaps(system)
    row |= {"seconds/swaps": after - swap_seconds, "swaps": swaps_after - swaps}
    row |= {f"hidden/{name}": value - before.get(name, 0) for name, value in _hidden_costs().items()}
    row |= watch.between(start, start + seconds)
    episodes = row["seconds/episodes"]
    for name, begin, end in (("episodes", start, start + episodes), ("after", start + episodes, start + seconds)):
        row |= {f"{key}/{name}": value for key, value in watch.between(begin, end).items()}
    if on_gpu:
        row["trainer_peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["trainer_peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    try:
        row |= _bounds(system, result, tape.samples, row, machine)
    except Exception:
        traceback.print_exc()
    return row


def scaled(row: Row, images: int, to: int = 16) -> float:
    """Seconds of a step of ``to`` images, from one of fewer: swaps and EMA stay, all else grows."""
    fixed = row["seconds/swaps"] + row["seconds/ema"]
    return (row["seconds/step"] - fixed) * to / images + fixed


def _swaps(system: System) -> tuple[float, int]:
    return getattr(system.engine, "swap_seconds", 0.0), getattr(system.engine, "swaps", 0)


def _hidden_costs() -> dict[str, float]:
    """Since the process began: seconds spent compiling and graphs made, and the CUDA allocator's calls to the driver,
    retries with its cache emptied and failures. A step that compiled, or whose memory was full, says so."""
    compiling = calculate_time_spent()
    costs = {"compile_seconds": compiling["total_wall_time"], "graphs": counters["stats"]["unique_graphs"]}
    if torch.cuda.is_available():
        memory = torch.cuda.memory_stats()
        costs |= {
            name: memory[name] for name in ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")
        }
    return costs


def _phases(result: StepResult, samples: Sequence[Sample], start: float) -> Row:
    """Seconds and tokens by phase and by kind of call: from its first start to its last end, both from the step's."""
    row: Row = {key: value for key, value in result.metrics.items() if key.startswith("seconds/")}
    tokens = sum(s.tokens for s in samples)
    row |= {"generated_tokens": tokens, "generated_tokens_per_s": tokens / row["seconds/episodes"]}
    row["requests_in_flight"] = sum(s.end - s.start for s in samples) / row["seconds/episodes"]
    for call in CallType:
        chosen = [s for s in samples if s.call is call]
        if chosen:
            begin, end = min(s.start for s in chosen) - start, max(s.end for s in chosen) - start
            row[f"call/{call}"] = {
                "samples": len(chosen),
                "from_s": round(begin, 2),
                "to_s": round(end, 2),
                "tokens": sum(s.tokens for s in chosen),
                "prompt_tokens": sum(len(s.prompt_ids) for s in chosen),
            }
    trained = [len(r.completion.prompt_token_ids) + len(r.completion.token_ids) for r in result.rollouts]
    update = row["seconds/update"] + row.get("seconds/backward", 0.0)
    row |= {"trained_tokens": sum(trained), "trained_tokens_per_s": sum(trained) / update}
    return row


def _worth_printing(key: str) -> bool:
    """Whether a metric tells how well the machinery worked rather than what random weights said."""
    starts = ("retained/", "ema/", "engine", "memory/", "trained_", "calls/", "ratio", "clip", "grad_norm", "unparsed/")
    return key.startswith(starts) or key in ("p_sel", "correct", "blank_image_gap")


def _bounds(system: System, result: StepResult, samples: Sequence[Sample], row: Row, machine: Machine) -> Row:
    """Rooflines in seconds and the share reached: with as many requests in flight as there were, and with all that the
    longest chain allows ("ideal")."""
    base: Any = system.backbone.model
    shape = Shape.of(base.config)
    prefill = prefill_flops(samples, shape) / machine.flops
    running = decode_seconds(samples, steps_in_flight(samples), shape, machine)
    ideal = decode_seconds(samples, longest_chain(samples), shape, machine)
    update, unshared = (update_flops(result.rollouts, shape, once) / machine.flops for once in (True, False))
    spent = row["seconds/update"] + row.get("seconds/backward", 0.0)
    bounds = {
        "step_without_overlap_s": prefill + ideal + update,
        "step_with_overlap_s": max(ideal, prefill + update),
        "prefill_s": prefill,
        "decode_in_flight_s": running,
        "decode_ideal_s": ideal,
        "update_s": update,
        "update_unshared_s": unshared,
        "episodes_reached": (prefill + running) / row["seconds/episodes"],
        "episodes_reached_of_ideal": (prefill + ideal) / row["seconds/episodes"],
        "update_reached": update / spent,
        "update_reached_of_unshared": unshared / spent,
        "step_reached": (prefill + running + update) / row["seconds"],
        "step_reached_of_ideal": (prefill + ideal + update) / row["seconds"],
    }
    return {f"roofline/{key}": value for key, value in bounds.items()}


def show(row: Row) -> None:
    """One line per number, at once."""
    for key, value in row.items():
        print(f"{key:<36} {value:.6g}" if isinstance(value, float) else f"{key:<36} {value}", flush=True)


def run(args: argparse.Namespace, folder: Path) -> None:
    """All steps; every number is printed and written as soon as it is known."""
    plan = planned(args)
    write_images(folder, sum(item.images for item in plan), args.rehearse)
    config = make_config(args, folder)
    machine = Machine(args.bandwidth, args.flops)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    report: Row = {"machine": f"{device}, torch {torch.__version__}", "steps": []}
    report["arguments"] = {key: str(value) for key, value in vars(args).items()}
    print(f"{report['machine']}; lengths forced, texts recorded, Verifier calls without schemas", flush=True)
    start = time.perf_counter()
    iterations = Iterations() if args.iterations else None
    options = LOGGING if args.iterations else {}
    with GpuWatch() as watch, recording(options) as engines, assemble(config) as system:
        system.serve(0)
        if iterations is not None:
            iterations.listen()
        report["seconds/start"] = time.perf_counter() - start
        print(f"start: {report['seconds/start']:.1f} s; {system.backbone.describe_trainable()}", flush=True)
        check_that_the_engine_agrees(system, Notes())
        (tape,) = [engine.tape for engine in engines if hasattr(engine, "tape")]
        for step, item in enumerate(plan):
            print(f"--- step {step + 1}: {item.name}{' (warm-up)' if step == 0 else ''}", flush=True)
            item.arrange(system, config)
            tape.begin(forced_lengths(item.kind, args.scale))
            row: Row = {"step": item.name}
            start = time.time()
            try:
                row |= measured_step(system, step, tape, watch, machine)
            except Exception:
                traceback.print_exc()
                continue
            if iterations is not None:
                row |= iterations.between(start, start + row["seconds/episodes"])
            if item.images != 16:
                row["seconds/scaled_to_16_images"] = scaled(row, item.images)
            show(row)
            report["steps"].append(row)
            if args.out:
                args.out.write_text(json.dumps(report, indent=1))
    for done in report["steps"]:
        print(f"{done['step']:<12} {done['seconds/step']:8.2f} s a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory made by eight_billion.py")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--plan", help="steps KIND[/on|/off][#SUB_BATCH][@IMAGES], with commas; instead of --steps and --tail"
    )
    parser.add_argument("--layout", choices=("adapters", "paper"))
    parser.add_argument("--sub-batch", type=int)
    parser.add_argument("--overlap", choices=("auto", "on", "off"))
    parser.add_argument("--tail", action="store_true", help="long-tailed lengths with the same means")
    parser.add_argument("--iterations", action="store_true", help="what each of vLLM's iterations took, by its size")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--rehearse", action="store_true", help="small images, few tokens")
    parser.add_argument("--bandwidth", type=float, default=Machine().bandwidth)
    parser.add_argument("--flops", type=float, default=Machine().flops)
    parser.add_argument("--out", type=Path, help="JSON, rewritten after every step")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    if args.rehearse:
        args.scale, args.images = min(args.scale, 0.02), min(args.images, 4)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(args, Path(folder))
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
