"""The Verifier's average at 8B size: seconds per update, memory, and what low rank loses against the exact average.

    python benchmarks/ema_speed.py [--device cuda] [--threads N] [--layers N] [--out FILE.json]
    OMP_NUM_THREADS=1 python benchmarks/ema_speed.py --tiny --device cpu        # small matrices, seconds

Shapes are those of Qwen3-VL-8B's language model (36 layers, 7 matrices each; policy rank 32, Verifier rank 64).
The policy moves as under AdamW: every entry of B and A by about 1e-5 a step, half of it (in variance) in a constant
direction, half noise. Errors are Frobenius norms relative to D: of one step's truncation (over all matrices of one
layer), and of D after each step against float64 D averaged densely (one matrix of each shape).
"""

import argparse
import json
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from trinity_vlm.ema import FactoredEma, LowRank

ALPHA = 0.999
RATE = 1e-5
Result = TypeVar("Result")


def main() -> None:
    options = parse_options()
    device = torch.device(options.device)
    width, middle, small, rank, layers = (128, 384, 32, 8, 2) if options.tiny else (4096, 12288, 1024, 32, 36)
    shapes = {
        **{"q": (width, width), "k": (small, width), "v": (small, width), "o": (width, width)},
        **{"gate": (middle, width), "up": (middle, width), "down": (width, middle)},
    }
    layers = options.layers or layers
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report: dict[str, object] = {"device": name, "torch": torch.__version__}
    counts = {options.threads or torch.get_num_threads(), 1}
    parts: dict[str, Callable[[], dict[str, object]]] = {
        f"speed, {count} threads": partial(measure_speed, shapes, layers, rank, device, options.updates, count)
        for count in sorted(counts, reverse=True)
    }
    parts["error"] = partial(measure_error, shapes, rank, device, options.steps)
    for title, part in parts.items():
        print(f"# {title} ({name}, torch {torch.__version__})", flush=True)
        try:
            report[title] = part()
        except Exception:
            traceback.print_exc()
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--threads", type=int, help="of the CPU; speed is measured with as many and with one")
    parser.add_argument("--layers", type=int, help="36 unless --tiny")
    parser.add_argument("--updates", type=int, default=5, help="updates timed after the first")
    parser.add_argument("--steps", type=int, default=50, help="steps over which errors are followed")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure_speed(
    shapes: dict[str, tuple[int, int]], layers: int, rank: int, device: torch.device, updates: int, threads: int
) -> dict[str, object]:
    """All matrices: seconds to make the average, for the first and the following updates; memory at its peak."""
    torch.set_num_threads(threads)
    policies = walk({f"{i}.{n}": shape for i in range(layers) for n, shape in shapes.items()}, rank, device)
    policy = next(policies)
    ema, made = timed(lambda: FactoredEma(policy, ALPHA, 2 * rank), device)
    before = memory(device)
    seconds = [timed(partial(ema.update, moved), device)[1] for moved in islice(policies, updates + 1)]
    speed: dict[str, object] = {
        "matrices": len(policy),
        "seconds_to_make": made,
        "seconds_first": seconds[0],
        "seconds_following": statistics.median(seconds[1:]),
        "seconds_worst": max(seconds[1:]),
        "gib_before": before,
        "gib_peak": peak(device),
        "gib_process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    show(speed)
    return speed


def measure_error(shapes: dict[str, tuple[int, int]], rank: int, device: torch.device, steps: int) -> dict[str, object]:
    """One layer over many steps, beside dense averages of one matrix of each shape."""
    policies = walk(shapes, rank, device)
    policy = next(policies)
    ema = FactoredEma(policy, ALPHA, 2 * rank)
    dense = {name: exact(policy[name]) for name in {shape: name for name, shape in shapes.items()}.values()}
    per_step: list[float] = []
    drifted: list[float] = []
    for _ in range(steps):
        policy = next(policies)
        per_step.append(ema.update(policy).max_error)
        for name, delta in dense.items():
            delta.mul_(ALPHA).add_(exact(policy[name]), alpha=1 - ALPHA)
        errors = [(exact(ema.factors()[name]) - delta).norm() / delta.norm() for name, delta in dense.items()]
        drifted.append(float(torch.stack(errors).max()))
    found: dict[str, object] = {
        "steps": steps,
        "step_error_median": statistics.median(per_step),
        "step_error_max": max(per_step),
        "delta_error_max": max(drifted),
        "delta_error_last": drifted[-1],
    }
    show(found)
    return found


def walk(shapes: dict[str, tuple[int, int]], rank: int, device: torch.device) -> Iterator[dict[str, LowRank]]:
    """Policies: first a fresh adapter (B = 0, A uniform), then one AdamW-sized step after the other, in place."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(factor: torch.Tensor) -> torch.Tensor:
        return torch.randn(factor.shape, device=device, generator=generator)

    policy = {
        name: LowRank(
            torch.zeros(out, rank, device=device),
            (2 * torch.rand(rank, into, device=device, generator=generator) - 1) / into**0.5,
        )
        for name, (out, into) in shapes.items()
    }
    factors = [factor for delta in policy.values() for factor in (delta.left, delta.right)]
    drifts = [noise(factor).sign_() for factor in factors]
    while True:
        yield policy
        for factor, drift in zip(factors, drifts, strict=True):
            factor.add_(drift + noise(factor), alpha=RATE * 0.5**0.5)


def exact(delta: LowRank) -> torch.Tensor:
    return delta.left.double() @ delta.right.double()


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> float | None:
    """GiB of tensors on the GPU now, from which on the peak counts."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 2**30


def peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def show(numbers: dict[str, object]) -> None:
    for key, value in numbers.items():
        print(f"{key:<20} {value:.3g}" if isinstance(value, float) else f"{key:<20} {value}", flush=True)


if __name__ == "__main__":
    main()
