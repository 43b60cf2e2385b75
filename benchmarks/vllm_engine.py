"""The vLLM engine as it ships: decoding against the roofline, what adapters cost, prefix cache, loads, starts.

    python benchmarks/eight_billion.py /dev/shm/qwen3-vl-8b
    python benchmarks/vllm_engine.py --model /dev/shm/qwen3-vl-8b --out engine.json
    python benchmarks/vllm_engine.py --model ... --parts decode --requests 128 --mixes policy+verifier \\
        --variants all-modules,streams,tuned,tuned+streams --tuned kernels          # a minute each
    python benchmarks/vllm_engine.py --model DIR --rehearse          # the same code, a tiny model, a CPU

Parts: ``decode`` (requests of about 1,150 prompt tokens, 650 of them visual, no two with a common beginning, 512
forced tokens: base rows, policy alone, policy and verifier half and half), ``loads`` (an adapter from the trainer's
tensors to the first request that may use it, canary included), ``prefix`` (the product's screening prompts, eight
questions for each of 16 images: vLLM's own count of prompt tokens found in its prefix cache), ``swap`` (paper layout:
whole weights; needs the variant ``none``). Variants are engines with other options, each with a start of its own; see
``VARIANTS``, and join several with ``+``.

    decode tok/s = n (tokens - 1) / (seconds - seconds of the same with one token)
    roofline     = n bandwidth / (weight bytes + n (prompt + tokens / 2) key-value bytes per token)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _roofline import Machine, Shape
from PIL import Image

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import Config, load_config
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.vllm import engine as vllm_engine
from trinity_vlm.engine.vllm.engine import VllmEngine
from trinity_vlm.roles import Verifier
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.types import POLICY, VERIFIER, CallType, ImageRecord, Message, Prompt

IMAGES = 16
TAILS = 8
WORDS = ("chart", "left", "axis", "value", "line", "green", "total", "between", "label", "year", "share", "point")
MIXES: dict[str, tuple[str | None, ...]] = {
    "base": (None,),
    "policy": (POLICY,),
    "policy+verifier": (POLICY, VERIFIER),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Options of an engine: arguments of AsyncEngineArgs, environment of its process, adapters at all."""

    overrides: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    adapters: bool = True


VARIANTS = {
    "shipped": Variant(),
    "all-modules": Variant({"lora_target_modules": None}),  # embeddings and output layer wrapped too
    "two-slots": Variant({"max_loras": 2}),
    "active": Variant({"specialize_active_lora": True}),  # unsafe with base rows beside adapter rows
    "streams": Variant(environment={"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}),
    "untuned": Variant(environment={"VLLM_TUNED_CONFIG_FOLDER": ""}),
    "none": Variant(adapters=False),
}


class Report:
    """Numbers, printed and written as they come."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._start = time.perf_counter()
        self.numbers: dict[str, object] = {}

    def add(self, name: str, value: object) -> None:
        """One number or a short table of them."""
        shown = round(value, 4) if isinstance(value, float) else value
        self.numbers[name] = shown
        print(f"[{time.perf_counter() - self._start:6.1f} s] {name}: {shown}", flush=True)
        if self._out:
            self._out.write_text(json.dumps(self.numbers, indent=1))


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """A part that fails is printed; the others go on."""
    try:
        yield
    except Exception:
        print(f"{name} failed:", flush=True)
        traceback.print_exc()


@dataclass(slots=True)
class Bench:
    """What all parts share. ``forced``: tokens of the running measurement."""

    backbone: Backbone
    config: Config
    args: argparse.Namespace
    report: Report
    images: list[ImageRecord]
    serial: int = 0

    def requests(self, count: int, tokens: int, adapters: Sequence[str | None]) -> list[GenerationRequest]:
        """Prompts that share nothing with each other or any earlier one: each begins with words of its own."""
        requests = []
        for i in range(count):
            self.serial += 1
            words = random.Random(self.serial)
            text = " ".join(words.choices(WORDS, k=self.args.words))
            prompt = Prompt(
                (Message("system", f"Case {self.serial}."), Message("user", text, self.images[i % len(self.images)])),
                "<think>\n",
            )
            sampling = Sampling(1.0, 0.95, 20, tokens)
            adapter = adapters[i % len(adapters)]
            requests.append(GenerationRequest(prompt, adapter, sampling, i, CallType.SOLVE, (str(self.serial),)))
        return requests


def timed(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> float:
    """Seconds until all are answered, sent at once."""

    async def gather() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    start = time.perf_counter()
    asyncio.run(gather())
    return time.perf_counter() - start


@contextmanager
def endless() -> Iterator[None]:
    """vLLM ends no completion of its own accord."""
    arguments = vllm_engine.sampling_arguments

    def forced(*positional: Any, **named: Any) -> dict[str, Any]:
        return arguments(*positional, **named) | {"stop_token_ids": [], "ignore_eos": True}

    with mock.patch.object(vllm_engine, "sampling_arguments", forced):
        yield


def measure_decode(bench: Bench, engine: VllmEngine, label: str, adapters: bool) -> None:
    """Tokens per second for every mix and number of requests, and the share of the roofline."""
    args, shape = bench.args, Shape.of(bench.backbone.model.config)
    with endless():
        timed(engine, bench.requests(len(bench.images), 8, MIXES["policy+verifier"] if adapters else (None,)))
        for count in args.requests:
            for mix in args.mixes if adapters else ("base",):
                names = MIXES[mix]
                first = timed(engine, bench.requests(count, 1, names))
                requests = bench.requests(count, args.tokens, names)
                seconds = timed(engine, requests)
                prompt = len(bench.backbone.encode(requests[0].prompt).input_ids)
                weights = 2 * (shape.decoder + shape.head)
                kept = count * (prompt + args.tokens / 2) * shape.kv_bytes
                decode = count * (args.tokens - 1) / (seconds - first)
                roof = count * args.bandwidth / (weights + kept)
                bench.report.add(
                    f"{label}/decode/{count}/{mix}",
                    {
                        "tok_s": round(count * args.tokens / seconds),
                        "decode_tok_s": round(decode),
                        "roofline_tok_s": round(roof),
                        "of_roofline": round(decode / roof, 3),
                        "seconds": round(seconds, 2),
                        "prefill_s": round(first, 2),
                        "prompt_tokens": prompt,
                    },
                )


def measure_loads(bench: Bench, engine: VllmEngine, label: str) -> None:
    """Seconds of each adapter's load into the idle engine, three times."""
    for name in (POLICY, VERIFIER):
        seconds = []
        for version in range(1, 4):
            start = time.perf_counter()
            engine.load_adapter(name, version, bench.backbone.adapter_state(name))
            seconds.append(round(time.perf_counter() - start, 3))
        bench.report.add(f"{label}/load/{name}_s", seconds)


def measure_prefix(bench: Bench, engine: VllmEngine, label: str) -> None:
    """The share of prompt tokens found in the cache when each image is asked about again with other words."""
    verifier = Verifier(PromptSet.load(bench.config.roles.prompts), bench.config.roles)
    words = random.Random(7)
    waves = [
        [
            verifier.screening_prompt(image, " ".join(words.choices(WORDS, k=20)), words.choice(WORDS))
            for image in bench.images
        ]
        for _ in range(TAILS)
    ]
    sampling = Sampling(0.7, 0.8, 20, 8)
    before = engine.counters
    for wave in waves:
        keys = enumerate(wave)
        timed(engine, [GenerationRequest(p, VERIFIER, sampling, i, CallType.SCREEN, (str(i),)) for i, p in keys])
    prompt, cached = (engine.counters[k] - before[k] for k in ("prompt_tokens", "cached_prompt_tokens"))
    encoded = [[bench.backbone.encode(p).input_ids for p in column] for column in zip(*waves, strict=True)]
    common = sum(common_beginning(column) * (TAILS - 1) for column in encoded)
    ideal = common / sum(len(ids) for column in encoded for ids in column)
    bench.report.add(
        f"{label}/prefix", {"hit_rate": round(cached / prompt, 4), "common_to_an_images_prompts": round(ideal, 4)}
    )


def common_beginning(sequences: Sequence[Sequence[int]]) -> int:
    """How many elements all sequences share from the start."""
    different = (i for i, column in enumerate(zip(*sequences, strict=False)) if len(set(column)) > 1)
    return next(different, min(map(len, sequences)))


def measure_swap(bench: Bench, engine: VllmEngine, label: str) -> None:
    """Seconds of whole-weight swaps between verifier and policy."""
    seconds = [round(engine.swap_weights(name), 3) for name in (VERIFIER, POLICY, VERIFIER, POLICY)]
    bench.report.add(f"{label}/swap_s", seconds)


def play_variant(bench: Bench, label: str) -> None:
    """One engine with the joined options of ``label``, and the parts that it can play."""
    parts = [variants(bench.args)[name] for name in label.split("+")]
    overrides = {key: value for part in parts for key, value in part.overrides.items()}
    environment = {key: value for part in parts for key, value in part.environment.items()}
    adapters = all(part.adapters for part in parts)
    settings = bench.config.engine.vllm
    start = time.perf_counter()
    with mock.patch.dict(os.environ, environment):
        most = max(bench.args.requests)
        engine = VllmEngine(bench.backbone, bench.config.model, settings, most, adapters=adapters, overrides=overrides)
    try:
        bench.report.add(f"{label}/start_s", time.perf_counter() - start)
        bench.report.add(f"{label}/memory", memory(engine))
        chosen: dict[str, Callable[[], None]] = {
            "decode": lambda: measure_decode(bench, engine, label, adapters),
            "loads": lambda: measure_loads(bench, engine, label),
            "prefix": lambda: measure_prefix(bench, engine, label),
            "swap": lambda: measure_swap(bench, engine, label),
        }
        for part in bench.args.parts:
            if (part == "swap") != adapters or part == "decode":
                with guarded(f"{label}/{part}"):
                    chosen[part]()
    finally:
        engine.close()
        gc.collect()


def memory(engine: VllmEngine) -> dict[str, object]:
    """GiB of the whole GPU and of the trainer, and what is shared."""
    found: dict[str, object] = {"sharing": str(engine.sharing)}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"gpu_gib": round((total - free) / 2**30, 1)}
        found |= {"trainer_gib": round(torch.cuda.memory_reserved() / 2**30, 1)}
    return found


def make_bench(args: argparse.Namespace) -> Bench:
    """Backbone with two adapters that change something, and images of 650 tokens (rehearsing: 256)."""
    tiny = args.rehearse
    overrides = [f"model.path={args.model}", f"model.context={4096 if tiny else 20480}"]
    overrides += [f"engine.vllm.kv_cache_gib={args.cache_gib}", *args.overrides]
    if tiny:
        overrides += ["model.dtype=float32", "engine.vllm.kv_cache_gib=1.0"]
        overrides += ["roles.policy_tokens=512", "roles.verifier_tokens=512"]
    config = load_config("qwen3-vl-8b", overrides)
    start = time.perf_counter()
    backbone = Backbone.load(config.model, config.lora)
    backbone.add_adapter(VERIFIER, 2 * config.lora.rank, config.lora.alpha)
    generator = torch.Generator().manual_seed(0)
    for name in (POLICY, VERIFIER):
        state = backbone.adapter_state(name)
        drawn = {key: 0.01 * torch.randn(value.shape, generator=generator) for key, value in state.items()}
        backbone.load_adapter_state(name, drawn)
    numbers = np.random.default_rng(0)
    size = (512, 512) if tiny else (832, 800)
    noise = [Image.fromarray(numbers.integers(0, 255, (50, 50, 3), dtype=np.uint8)) for _ in range(IMAGES)]
    images = [ImageRecord(f"noise-{i}", picture.resize(size)) for i, picture in enumerate(noise)]
    bench = Bench(backbone, config, args, Report(args.out), images)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    bench.report.add("machine", f"{device}, torch {torch.__version__}")
    bench.report.add("backbone_start_s", time.perf_counter() - start)
    return bench


def variants(args: argparse.Namespace) -> dict[str, Variant]:
    """Those above, and the kernel options in the directory ``--tuned``."""
    if args.tuned is None:
        return VARIANTS
    return VARIANTS | {"tuned": Variant(environment={"VLLM_TUNED_CONFIG_FOLDER": str(args.tuned.resolve())})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory made by eight_billion.py")
    parser.add_argument("--variants", default="shipped,none", help="comma-separated; + joins")
    parser.add_argument("--parts", default="decode,loads,prefix,swap")
    parser.add_argument("--requests", default="64,128")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--words", type=int, default=470, help="of each prompt's text")
    parser.add_argument("--tuned", type=Path, help="directory of kernel options, made by lora_kernels.py")
    parser.add_argument("--cache-gib", type=float, default=45.0)
    parser.add_argument("--bandwidth", type=float, default=Machine().bandwidth)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    args.parts, args.mixes = args.parts.split(","), args.mixes.split(",")
    args.requests = [int(n) for n in args.requests.split(",")]
    if args.rehearse:
        args.requests, args.tokens, args.words = [2, 4], 8, 40
    bench = make_bench(args)
    for label in args.variants.split(","):
        with guarded(label):
            play_variant(bench, label)


if __name__ == "__main__":
    main()
