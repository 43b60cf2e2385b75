"""Options of vLLM's adapter kernels for one GPU and the layers of an 8B model, by trying.

    python benchmarks/lora_kernels.py --out kernels
    python benchmarks/vllm_engine.py --model ... --parts decode --variants untuned,tuned --tuned kernels

Each adapted layer costs two Triton kernels a step: shrink, x [rows, in] times A [rank, in], and expand, that times
B [out, rank], added to the layer's output. vLLM's default options know neither the GPU nor the shapes. Starting from
them, one option after the other is varied, and the fastest kept, over 36 layers' weights in turn (so that they come
from memory, as in a model) in a captured graph: all rows under one of two adapters, and half under each. A changed
option must give the same numbers. The files are those that vLLM's VLLM_TUNED_CONFIG_FOLDER takes; they are complete
from the start (defaults) and rewritten after every layer, so the run may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

RANKS = (16, 32, 64)
LAYERS = 36
Options = dict[str, int | None]
Key = tuple[str, int, int, int]  # operation, slices, rows, input width (shrink) or widest output (expand)
TRIALS: Mapping[str, Sequence[Mapping[str, Sequence[int]]]] = {
    "shrink": (
        {"block_k": (64, 128, 256), "split_k": (8, 16, 32, 64)},
        {"block_m": (16, 32, 64)},
        {"block_n": (16, 32, 64)},
        {"num_warps": (2, 4, 8)},
        {"num_stages": (2, 3, 4)},
    ),
    "expand": (
        {"block_n": (64, 128, 256)},
        {"block_m": (16, 32, 64, 128)},
        {"block_k": (16, 32, 64)},
        {"num_warps": (2, 4, 8)},
        {"num_stages": (1, 2, 3)},
    ),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer of stacked projections: input width, and the output width of each."""

    width: int
    outs: tuple[int, ...]


EIGHT_BILLION = (
    Layer(4096, (4096, 1024, 1024)),
    Layer(4096, (4096,)),
    Layer(4096, (12288, 12288)),
    Layer(12288, (4096,)),
)


class Kernels:
    """vLLM's two kernels over ``LAYERS`` sets of weights for ``slots`` adapters of rank ``rank``."""

    def __init__(self, layer: Layer, rows: int, slots: int, rank: int) -> None:
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        for remembered in (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT):  # by addresses, which are used again
            remembered.clear()
        self._modules = {"shrink": lora_shrink_op, "expand": lora_expand_op}
        self._layer, self._rows = layer, rows
        self._meta = LoRAKernelMeta.make(slots, rows, "cuda")
        draw = torch.Generator("cuda").manual_seed(0)

        def weights(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=draw)

        self._x = weights(rows, layer.width)
        self._middle = torch.zeros(len(layer.outs), rows, rank, device="cuda").normal_(0, 1, generator=draw)
        self._shrunk = torch.empty_like(self._middle)
        self._out = torch.zeros(rows, sum(layer.outs), dtype=torch.bfloat16, device="cuda")
        self._down = [[weights(slots, 1, rank, layer.width) for _ in layer.outs] for _ in range(LAYERS)]
        self._up = [[weights(slots, 1, out, rank) for out in layer.outs] for _ in range(LAYERS)]

    def seconds(self, operation: str, options: Options) -> tuple[float, Tensor]:
        """Of one layer, the mean over both mixes of adapters; and the numbers that came out of the first."""
        module = self._modules[operation]
        with mock.patch.object(module, "get_lora_op_configs", return_value=dict(options)):
            self._mix(2)
            for number in reversed(range(LAYERS)):  # vLLM gathers addresses at the first call, not within a graph
                self._out.zero_()
                self._call(operation, number)
            torch.cuda.synchronize()
            result = (self._shrunk if operation == "shrink" else self._out).clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for number in range(LAYERS):
                    self._call(operation, number)
        took = 0.0
        for adapters in (1, 2):
            self._mix(adapters)
            took += min(self._replay(graph) for _ in range(3))
        return took / 2 / LAYERS, result

    def _mix(self, adapters: int) -> None:
        self._meta.prepare_tensors(torch.arange(self._rows, device="cuda", dtype=torch.int32) % adapters)

    def _call(self, operation: str, number: int) -> None:
        arguments = self._meta.meta_args(self._rows, False)
        if operation == "shrink":
            self._modules[operation]._lora_shrink(self._x, self._down[number], self._shrunk, *arguments, 1.0)
        else:
            self._modules[operation]._lora_expand(
                self._middle, self._up[number], self._out, *arguments, offset_start=0, add_inputs=True
            )

    @staticmethod
    def _replay(graph: Any) -> float:
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 3000


def trials(operation: str) -> Iterator[list[Options]]:
    """Groups of changes that are tried together, one group after the other."""
    for group in TRIALS[operation]:
        changes: list[Options] = [{}]
        for name, values in group.items():
            changes = [change | {name: value} for change in changes for value in values]
        yield changes


def tune(kernels: Kernels, operation: str, default: Options) -> tuple[float, float, Options]:
    """Seconds of the default options, of the best, and the best."""
    best, expected = kernels.seconds(operation, default)
    before, options = best, default
    tolerance = 0.02 * float(expected.float().std())
    for changes in trials(operation):
        base = options
        for change in changes:
            try:
                seconds, result = kernels.seconds(operation, base | change)
            except Exception as error:  # too much shared memory, for example
                print(f"  {operation} {change}: {type(error).__name__}", flush=True)
                continue
            if seconds < 0.98 * best and torch.allclose(result.float(), expected.float(), rtol=0.02, atol=tolerance):
                best, options = seconds, base | change
    return before, best, options


def as_vllm_reads(chosen: Mapping[Key, Options], slots: int) -> dict[str, dict[str, Any]]:
    """Per file name part: max_loras + 1, slices, rows, k, n. No block is wider than the rank it runs along."""
    files: dict[str, dict[str, Any]] = {}
    for (operation, slices, rows, width), options in chosen.items():
        for rank in RANKS:
            k, n = (width, rank) if operation == "shrink" else (rank, width)
            along = "block_n" if operation == "shrink" else "block_k"
            fitted = options | {along: min(int(options[along] or rank), rank)}
            for name in ("SHRINK",) if operation == "shrink" else ("EXPAND_TRUE", "EXPAND_FALSE"):
                by_slices = files.setdefault(name, {}).setdefault(str(slots + 1), {}).setdefault(str(slices), {})
                by_slices.setdefault(str(rows), {}).setdefault(str(k), {})[str(n)] = fitted
    return files


def write(folder: Path, chosen: Mapping[Key, Options], slots: int) -> None:
    """The files under the names that vLLM looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    for name, content in as_vllm_reads(chosen, slots).items():
        (folder / f"{gpu}_{name}.json").write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="128,64,8192,2048", help="tokens of a step: decoding, and a chunk of prompts")
    parser.add_argument("--layers", default="0,1,2,3", help="of qkv, o, gate and up, down; several processes on other")
    parser.add_argument("--slots", type=int, default=3, help="vLLM's max_loras")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=240.0, help="no further layer is begun after these")
    args = parser.parse_args()
    from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

    start = time.perf_counter()
    layers = [EIGHT_BILLION[int(index)] for index in args.layers.split(",")]
    everything = [(int(rows), layer) for rows in args.rows.split(",") for layer in layers]
    chosen: dict[Key, Options] = {}
    for rows, layer in everything:
        for operation in TRIALS:
            _, slices, _, width = key = key_of(operation, layer, rows)
            chosen[key] = dict(
                get_lora_op_configs(operation, args.slots + 1, rows, width, args.rank, slices, add_inputs=True)
            )
    found: dict[Key, tuple[float, float]] = {}
    for rows, layer in everything:
        if time.perf_counter() - start > args.seconds:
            print(f"{rows} rows, {layer}: out of time, defaults stay", flush=True)
            continue
        kernels = Kernels(layer, rows, args.slots, args.rank)
        for operation in TRIALS:
            key = key_of(operation, layer, rows)
            if key in found:
                continue
            try:
                before, after, chosen[key] = tune(kernels, operation, chosen[key])
            except Exception:
                traceback.print_exc()
                continue
            found[key] = before, after
            write(args.out, chosen, args.slots)
            shown = f"{before * 1e6:.1f} -> {after * 1e6:.1f} us {chosen[key]}"
            print(f"[{time.perf_counter() - start:4.0f} s] {rows} rows, {layer} {operation}: {shown}", flush=True)

    for rows in {rows for rows, _ in everything}:
        keys = [key_of(operation, layer, rows) for layer in layers for operation in TRIALS]
        if found.keys() >= set(keys):
            before, after = (LAYERS * 1e3 * sum(found[key][i] for key in keys) for i in range(2))
            print(f"{rows} rows, {LAYERS} layers: {before:.2f} -> {after:.2f} ms a step", flush=True)


def key_of(operation: str, layer: Layer, rows: int) -> Key:
    """What vLLM looks options up by, beside the rank."""
    return operation, len(layer.outs), rows, layer.width if operation == "shrink" else max(layer.outs)


if __name__ == "__main__":
    main()
