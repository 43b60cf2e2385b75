"""How fast the microcosm makes images, problems and demonstrations on one core.

    OMP_NUM_THREADS=1 python benchmarks/microcosm_speed.py

Guide: about 1 ms an image, 1 to 2 ms a problem with its image, below 1 ms a demonstration (four share an image).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from trinity_vlm.environments.microcosm import Microcosm
from trinity_vlm.tiny.demonstrations import DEFAULT_MIX, demonstrations

ROUNDS = 400


def milliseconds(work: Callable[[], object], items: int) -> float:
    """Wall-clock per item."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) / items * 1e3


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    world = Microcosm()
    world.problems("train", 50, 0)
    rows = {
        "image": milliseconds(lambda: [world.image("evolve", i) for i in range(ROUNDS)], ROUNDS),
        "problem": milliseconds(lambda: world.problems("evolve-heldout", ROUNDS, 0), ROUNDS),
        "demonstration": milliseconds(
            lambda: [demonstrations(DEFAULT_MIX, 0, i) for i in range(ROUNDS)], ROUNDS * DEFAULT_MIX.per_image
        ),
    }
    for name, value in rows.items():
        print(f"{name:<14} {value:6.2f} ms")


if __name__ == "__main__":
    main()
