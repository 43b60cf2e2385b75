"""What an adapter's change is worth once it is merged into bfloat16 weights, which `engine.layout=paper` does.

    OMP_NUM_THREADS=1 python benchmarks/merged_rounding.py [--steps 1,10,100,300] [--out FILE.json]     # CPU, a minute

One q_proj of Qwen3-VL-8B's shape, W normal with deviation 0.02 and rounded to bfloat16; the policy's D = B A moves as
under AdamW (``ema_speed.walk``), the Verifier averages it. With R = bfloat16(W + D) - W, what is left of D:

kept   <R, D> / <D, D>: 1 if nothing is lost on average, 0 if the weights stay as they were
error  |R - D| / |D|: 0 if nothing is lost, 1 or more if what remains says nothing about D
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from ema_speed import ALPHA, RATE, exact, walk

SHAPE, RANK, DEVIATION = (4096, 4096), 32, 0.02


def survival(weight: torch.Tensor, delta: torch.Tensor) -> dict[str, float]:
    """Of ``delta`` [out, in] after one rounding to the dtype of ``weight``."""
    moved = (weight.double() + delta).to(weight.dtype).double() - weight.double()
    return {
        "kept": float((moved * delta).sum() / delta.square().sum()),
        "error": float((moved - delta).norm() / delta.norm()),
        "size": float(delta.norm() / weight.double().norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="1,10,100,300", help="after how many steps, with commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = sorted({int(step) for step in options.steps.split(",")})
    weight = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * DEVIATION).bfloat16()
    policies = walk({"q_proj": SHAPE}, RANK, torch.device("cpu"))
    verifier = exact(next(policies)["q_proj"])
    print(f"torch {torch.__version__}, AdamW steps of {RATE}, rank {RANK}, EMA {ALPHA}")
    print(f"{'step':>5} {'of':<9} {'kept':>7} {'error':>7} {'|D|/|W|':>9}")
    rows = []
    for step, policy in enumerate(islice(policies, wanted[-1]), 1):
        delta = exact(policy["q_proj"])
        verifier.mul_(ALPHA).add_(delta, alpha=1 - ALPHA)
        if step not in wanted:
            continue
        for name, change in (("policy", delta), ("Verifier", verifier)):
            row = survival(weight, change)
            rows.append({"step": step, "of": name} | row)
            print(f"{step:>5} {name:<9} {row['kept']:7.3f} {row['error']:7.2f} {row['size']:9.1e}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
