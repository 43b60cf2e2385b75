"""Adapter versions and verdicts of the real engine with the embedded model, under load.

    python benchmarks/vllm_versions.py --out versions.json             # 1,000 requests a version, four versions
    python benchmarks/vllm_versions.py --requests 24 --sequences 64    # the same on a CPU, smaller

``swap``: all requests of a version are sent at once, the next version is loaded while they run, and so on. Every
completion must have been computed by exactly the version that was current when it was sent: its log-probabilities are
compared with those the trainer gives its tokens under each version in turn (the mean gap to its own must be far below
that to any other). Greedy completions of the idle engine are compared too: in bfloat16 near ties part some of them.
``verdicts``: screening and reasoning verdicts of random questions through the product's prompts, schemas and parsers;
all must parse. Exits with 1 when either fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import Config, load_config
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.vllm.engine import VllmEngine
from trinity_vlm.roles import Verifier
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.types import POLICY, VERIFIER, CallType, Completion, ImageRecord, Message, Prompt

VERSIONS = (11, 12, 13, 11)
SCALE = 0.05
ROWS = 64
WORDS = ("circle", "square", "left", "red", "blue", "largest", "between", "count", "above", "small", "green", "of")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of each version, all in flight at once")
    parser.add_argument("--sequences", type=int, default=256, help="decoded side by side")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--verdicts", type=int, default=256, help="of each kind")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    roles = ["roles.verifier_tokens=360", "roles.justification_chars=120"]
    config = load_config("tiny", [*roles, "engine.vllm.kv_cache_gib=4", *args.overrides])
    backbone = Backbone.load(config.model, config.lora)
    backbone.add_adapter(VERIFIER, 2 * config.lora.rank, config.lora.alpha)
    for number, name in enumerate((POLICY, VERIFIER)):
        backbone.load_adapter_state(name, random_state(backbone, name, number))
    engine = VllmEngine(backbone, config.model, config.engine.vllm, args.sequences)
    found: dict[str, object] = {"device": str(backbone.device), "dtype": str(backbone.dtype)}
    good = True
    try:
        for part in (swap_under_load, parse_verdicts):
            try:
                good &= part(engine, config, args, found)
            except Exception:
                traceback.print_exc()
                good = False
            print(json.dumps(found, indent=1), flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1))
    finally:
        engine.close()
    sys.exit(not good)


def random_state(backbone: Backbone, name: str, seed: int) -> dict[str, torch.Tensor]:
    """An adapter of its own for every seed."""
    generator = torch.Generator().manual_seed(seed)
    state = backbone.adapter_state(name)
    return {key: SCALE * torch.randn(value.shape, generator=generator) for key, value in state.items()}


def question(generator: random.Random, count: int = 12) -> str:
    """Words in no order."""
    return " ".join(generator.choices(WORDS, k=count)) + "?"


def images(count: int) -> list[ImageRecord]:
    """Noise of the size the model was trained with."""
    numbers = np.random.default_rng(0)
    pixels = (numbers.integers(0, 255, (128, 128, 3), dtype=np.uint8) for _ in range(count))
    return [ImageRecord(f"noise-{i}", Image.fromarray(p)) for i, p in enumerate(pixels)]


def swap_under_load(engine: VllmEngine, config: Config, args: argparse.Namespace, found: dict[str, object]) -> bool:
    """Whether no completion was touched by another version than its own."""
    generator, pictures = random.Random(1), [*images(15), None]
    sampling = Sampling(0.0, 1.0, 0, args.tokens)
    asked = [
        GenerationRequest(
            Prompt((Message("user", f"{i}: {question(generator)}", pictures[i % len(pictures)]),), "<think>\n"),
            POLICY,
            sampling,
            i,
            CallType.SOLVE,
            (str(i),),
            want_logprobs=True,
        )
        for i in range(args.requests)
    ]
    backbone, distinct = engine.backbone, sorted(set(VERSIONS))
    states = {seed: random_state(backbone, POLICY, seed) for seed in distinct}
    greedy = {}
    for seed in distinct:
        engine.load_adapter(POLICY, seed, states[seed])
        greedy[seed] = asyncio.run(answer(engine, asked))
    start = time.perf_counter()
    sent, in_flight, load_seconds = asyncio.run(send_and_swap(engine, asked, states))
    found["swap/seconds"] = round(time.perf_counter() - start, 2)
    found["swap/in_flight_at_loads"] = in_flight
    found["swap/load_s"] = load_seconds
    gaps = torch.stack([version_gaps(backbone, asked * len(VERSIONS), sent, states[seed]) for seed in distinct])
    own = torch.tensor([distinct.index(seed) for seed in VERSIONS for _ in asked])
    of_own = gaps.gather(0, own[None])[0]
    of_others = gaps.scatter(0, own[None], float("inf")).min(0).values
    same = [c.token_ids == greedy[s][i].token_ids for s, part in parts(sent, len(asked)) for i, c in enumerate(part)]
    found["swap/completions"] = len(sent)
    found["swap/equal_to_the_idle_engines"] = round(sum(same) / len(same), 4)
    found["swap/gap_to_own_version_nat"] = {"mean": float(of_own.mean()), "max": float(of_own.max())}
    found["swap/gap_to_nearest_other_nat"] = {"mean": float(of_others.mean()), "min": float(of_others.min())}
    found["swap/mixed"] = int((of_own * 3 > of_others).sum())
    return found["swap/mixed"] == 0 and min(in_flight[1:]) >= len(asked) // 2


def parts(sent: Sequence[Completion], size: int) -> list[tuple[int, Sequence[Completion]]]:
    """The completions of each version in turn."""
    return [(seed, sent[i * size : (i + 1) * size]) for i, seed in enumerate(VERSIONS)]


async def answer(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """One completion each, all sent at once."""
    return [completions[0] for completions in await asyncio.gather(*(engine.generate(r) for r in requests))]


async def send_and_swap(
    engine: VllmEngine, asked: Sequence[GenerationRequest], states: dict[int, dict[str, torch.Tensor]]
) -> tuple[list[Completion], list[int], list[float]]:
    """Completions of all versions in turn, requests in flight when each was loaded, and seconds of the loads."""
    tasks: list[asyncio.Task[list[Completion]]] = []
    in_flight, seconds = [], []
    for number, seed in enumerate(VERSIONS):
        in_flight.append(sum(not task.done() for task in tasks))
        start = time.perf_counter()
        engine.load_adapter(POLICY, 100 + number, states[seed])
        seconds.append(round(time.perf_counter() - start, 2))
        tasks += [asyncio.create_task(engine.generate(request)) for request in asked]
        await asyncio.sleep(0.05)
    return [completions[0] for completions in await asyncio.gather(*tasks)], in_flight, seconds


@torch.no_grad()
def version_gaps(
    backbone: Backbone,
    asked: Sequence[GenerationRequest],
    sent: Sequence[Completion],
    state: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Per completion the mean difference between its log-probabilities and the trainer's under ``state``."""
    backbone.load_adapter_state(POLICY, state)
    gaps = []
    for start in range(0, len(sent), ROWS):
        rows = range(start, min(start + ROWS, len(sent)))
        batch = backbone.collate([(backbone.encode(asked[i].prompt), sent[i].token_ids) for i in rows], "right")
        expected = backbone.completion_logprobs(batch, POLICY).float().cpu()
        for row, i in enumerate(rows):
            reported = torch.tensor(sent[i].logprobs)
            gaps.append((expected[row, : len(reported)] - reported).abs().mean())
    return torch.stack(gaps)


def parse_verdicts(engine: VllmEngine, config: Config, args: argparse.Namespace, found: dict[str, object]) -> bool:
    """Whether every verdict parses."""
    verifier = Verifier(PromptSet.load(config.roles.prompts), config.roles)
    generator, pictures = random.Random(2), images(16)
    rule = config.roles.verifier_sampling
    sampling = Sampling(rule.temperature, rule.top_p, rule.top_k, config.roles.verifier_tokens)

    def request(call: CallType, prompt: Prompt, seed: int) -> GenerationRequest:
        schema = verifier.schemas[call]
        return GenerationRequest(prompt, VERIFIER, sampling, seed, call, (str(seed),), json_schema=schema)

    asked = []
    for i in range(args.verdicts):
        image, text = pictures[i % len(pictures)], question(generator)
        asked.append(request(CallType.SCREEN, verifier.screening_prompt(image, text, generator.choice(WORDS)), i))
        reasoning = question(generator, 40)
        asked.append(request(CallType.REASON, verifier.reasoning_prompt(image, text, reasoning), i))
    start = time.perf_counter()
    completions = asyncio.run(answer(engine, asked))
    found["verdicts/seconds"] = round(time.perf_counter() - start, 2)
    parsed: dict[CallType, list[bool]] = {CallType.SCREEN: [], CallType.REASON: []}
    for r, completion in zip(asked, completions, strict=True):
        parse = verifier.parse_screening if r.call is CallType.SCREEN else verifier.parse_reasoning
        parsed[r.call].append(parse(completion).parsed)
    for call, results in parsed.items():
        found[f"verdicts/{call}"] = f"{sum(results)} of {len(results)} parsed"
    found["verdicts/truncated"] = sum(completion.finish_reason == "length" for completion in completions)
    return all(map(all, parsed.values()))


if __name__ == "__main__":
    main()
