"""Seconds per outer step of the tiny preset, by phase, and tokens per second. Timings are noisy on shared machines.

    python benchmarks/step_time.py [STEPS] [KEY=VALUE ...]
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/step_time.py      # one worker a core

The bar on two cores: at most 6 s a step with 8 images, G = 4, K = 4.
"""

import argparse
import os
import statistics

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from trinity_vlm.assembly import assemble
from trinity_vlm.config import load_config
from trinity_vlm.loop import outer_step
from trinity_vlm.workers import Workers


def main() -> None:
    options = parse_options()
    steps = options.steps
    config = load_config("tiny", ["evaluation.source=null", *options.settings])
    workers = Workers.from_environment()
    with assemble(config, workers) as system:
        system.serve(0)
        outer_step(system, 0)
        rows = [outer_step(system, step).metrics for step in range(1, steps + 1)]
    if not workers.is_main:
        return
    threads, device = torch.get_num_threads(), system.backbone.device
    print(f"{workers.world} workers, torch {torch.__version__}, {threads} threads, {device}, {steps} steps")
    for phase in ("episodes", "update", "ema", "step"):
        seconds = [row[f"seconds/{phase}"] for row in rows]
        print(f"{phase:<10} median {statistics.median(seconds):6.2f} s   worst {max(seconds):6.2f} s")
    tokens = sum(row[f"completion_tokens/{who}"] for row in rows for who in ("questioner", "solver", "verifier"))
    print(f"{tokens / sum(row['seconds/episodes'] for row in rows):.0f} generated tokens/s while episodes run")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="?", type=int, default=8, metavar="STEPS", help="timed after a first (8)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="changes to the preset")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"STEPS={options.steps}: at least 1")
    return options


if __name__ == "__main__":
    main()
