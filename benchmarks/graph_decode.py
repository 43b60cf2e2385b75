"""Captured decode steps against the plain loop and against transformers' generate: same tokens? how fast?

    python benchmarks/graph_decode.py [--model DIR] [--sequences 128] [--tokens 120] [--dtype bfloat16] [--generate]

Needs a CUDA device (on a CPU the fixed-shape steps run without capture: identity only). Prints one line per decoder:
tokens per second, wall seconds of a second call (the first one captures), and the share of completions identical to
the plain loop's. In float32 that share should be 1; in bfloat16 near-ties may fall the other way.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from PIL import Image

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.engine.decoding import Row, decode
from trinity_vlm.engine.graphs import StaticDecoder
from trinity_vlm.engine.protocol import Sampling
from trinity_vlm.types import POLICY, ImageRecord, Message, Prompt

SAMPLES_PER_PROMPT = 4


def make_rows(backbone: Backbone, args: argparse.Namespace) -> list[Row]:
    """``args.sequences`` rows: four samples of each prompt, each prompt with its own noise picture."""
    generator = np.random.default_rng(0)
    rows = []
    for i in range(args.sequences // SAMPLES_PER_PROMPT):
        pixels = Image.fromarray(generator.integers(0, 255, (args.side, args.side, 3), dtype=np.uint8))
        text = "Ask one hard question about this image." + " Be brief." * (i % 3)
        prompt = backbone.encode(Prompt((Message("user", text, ImageRecord(str(i), pixels)),), "<think>\n"))
        rule = Sampling(args.temperature, 0.95, 20, args.tokens)
        rows += [Row(prompt, rule, 1000 * i + s, args.tokens, want_logprobs=True) for s in range(SAMPLES_PER_PROMPT)]
    return rows


def timed(name: str, backbone: Backbone, args: argparse.Namespace, run, reference=None) -> list[list[int]]:
    """Run twice, report the second call."""
    for attempt in ("first", "second"):
        rows = make_rows(backbone, args)
        synchronize()
        start = time.perf_counter()
        with backbone.use_adapter(POLICY):
            run(rows)
        synchronize()
        seconds = time.perf_counter() - start
        print(f"{name:<10} {attempt:<7} {seconds:8.2f} s", flush=True)
    tokens = [row.token_ids for row in rows]
    same = np.mean([a == b for a, b in zip(tokens, reference or tokens, strict=True)])
    number = sum(map(len, tokens))
    print(
        f"{name:<10} {number:>7} tokens {number / seconds:>10,.0f} tok/s   identical to plain: {same:.4f}", flush=True
    )
    return tokens


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def generate_tokens(backbone: Backbone, args: argparse.Namespace, rows: list[Row]) -> None:
    """The same sequences through ``model.generate``, greedy or with its own sampler."""
    batch = backbone.collate([(row.prompt, ()) for row in rows], "left")
    with backbone.image_inputs(batch.prompts) as images, torch.no_grad():
        backbone.model.eval()
        out = backbone.model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            **batch.token_inputs,
            **images,
            max_new_tokens=args.tokens,
            do_sample=args.temperature > 0,
            top_k=20,
            top_p=0.95,
            suppress_tokens=sorted(backbone.placeholder_ids),
        )
    for row, ids in zip(rows, out[:, batch.input_ids.shape[1] :].tolist(), strict=True):
        stop = next((i + 1 for i, token in enumerate(ids) if token in backbone.eos_ids), len(ids))
        row.token_ids = ids[:stop]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--generate", action="store_true", help="also time transformers' generate")
    args = parser.parse_args()
    pixels = args.side**2
    config = ModelConfig(
        path=args.model, dtype=args.dtype, device=args.device, min_pixels=pixels, max_pixels=pixels, context=4096
    )
    backbone = Backbone.load(config, LoraConfig(rank=16, alpha=32))
    device = (
        torch.cuda.get_device_name() if backbone.device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"{device}, torch {torch.__version__}, {backbone.dtype}, {args.sequences} sequences, {args.tokens} tokens")
    plain = timed("plain", backbone, args, lambda rows: decode(backbone, rows))
    static = StaticDecoder(backbone, capture=backbone.device.type == "cuda")
    timed("graphs", backbone, args, lambda rows: static.decode(rows, POLICY), plain)
    if args.generate:
        timed("generate", backbone, args, lambda rows: generate_tokens(backbone, args, rows), plain)


if __name__ == "__main__":
    main()
