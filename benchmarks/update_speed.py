"""The update's forward and backward pass on one GPU: from separate rows to compiled shared rows, step by step.

    python benchmarks/update_speed.py --output build/update_speed.json          # about two minutes on an H200
    python benchmarks/update_speed.py --tiny --output build/update_speed.json   # the same code on a CPU

A group of K = 4 completions behind one prompt of about 1,150 tokens, 650 of them an image, through Qwen3-VL-8B's shape
with random weights and a LoRA of rank 32. Each line adds one thing to the line before it. Image features are computed
once, before the clock starts, as in a run. Printed of each line:

first      seconds of the first call (compiling included)
seconds    of a later one: the faster of two
counted    tokens per second if every sequence had its own prompt; computed: tokens that go through the layers
peak       GiB allocated at most, weights included; estimate: weights plus ``Backbone.activation_bytes``
mfu, hfu   FLOP/s over 790 TFLOP/s, without and with what is recomputed

FLOPs of n computed tokens, c of them completion tokens, and p pairs of a query and a key it sees:
    layers     2 n W forward, 2 n W backward (gradients of inputs only: W, the weights of all layers, is frozen)
    adapters   2 n A forward, 4 n A backward (A: their parameters)
    attention  4 p Q forward, 8 p Q backward, in each layer (Q: heads times head size)
    head       2 c V H forward, 2 c V H backward
Recomputing adds the forward parts of the recomputed layers, and the head's where it is recomputed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from eight_billion import write_config
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from trinity_vlm.backbone import Backbone, Batch, EncodedPrompt, load_processor
from trinity_vlm.backbone.logprobs import token_logprobs
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.types import POLICY, ImageRecord, Message, Prompt

COMPLETIONS = 4
PEAK_FLOPS = 790e12
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement."""

    name: str
    completion_tokens: int
    first: float
    seconds: float
    counted_per_second: float
    computed_per_second: float
    peak_gib: float
    estimate_gib: float
    mfu: float
    hfu: float


def build(args: argparse.Namespace, device: torch.device) -> Backbone:
    """The model on ``device``: of ``--model``, or of the shape with random weights."""
    side = 64 if args.tiny else 256
    settings: dict[str, Any] = {"dtype": "bfloat16", "context": 65_536, "min_pixels": side**2}
    lora = LoraConfig(rank=32, alpha=64)
    if args.model:
        return Backbone.load(ModelConfig(path=args.model, **settings), lora)
    folder = Path(tempfile.mkdtemp())
    write_config(folder, args.tiny)
    (folder / "drawn-at-random.safetensors").touch()  # a directory without any weights is refused
    config = ModelConfig(path=str(folder), **settings)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return Backbone(model.eval(), load_processor(config), lora, config.context)


def make_prompt(backbone: Backbone, tokens: int, size: tuple[int, int]) -> EncodedPrompt:
    """A prompt of about ``tokens`` tokens with a noise image of ``size`` pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image = ImageRecord("noise", Image.fromarray(pixels))
    words = 1
    while True:
        encoded = backbone.encode(Prompt((Message("user", "one image " * words, image),)))
        if len(encoded.input_ids) >= tokens - 2:
            return encoded
        words += max(1, (tokens - len(encoded.input_ids)) // 4)


def flops(backbone: Backbone, batches: Sequence[Batch], recomputed: bool, head_recomputed: bool) -> tuple[float, float]:
    """Needed FLOPs of the passes over all batches, and executed ones."""
    config = backbone.model.config.get_text_config()  # type: ignore[operator, union-attr]
    query, key = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    weights = config.hidden_size * (2 * query + 2 * key + 3 * config.intermediate_size) * config.num_hidden_layers
    adapter = sum(p.numel() for _, p in backbone.trainable_parameters())
    head = backbone.num_logits * config.hidden_size
    tokens = sum(batch.input_ids.numel() for batch in batches)
    completion = sum(int(batch.completion_mask.sum()) for batch in batches)
    pairs = sum(_pairs(batch) for batch in batches) * config.num_hidden_layers
    forward = 2 * tokens * (weights + adapter) + 4 * pairs * query
    needed = 2 * forward + 2 * tokens * adapter + 4 * completion * head
    return needed, needed + recomputed * forward + head_recomputed * 2 * completion * head


def _pairs(batch: Batch) -> int:
    if batch.segments is None:
        return sum(n * (n + 1) // 2 for n in batch.attention_mask.sum(dim=1).tolist())
    prompt = batch.segments.prompt
    own = sum(c * prompt + c * (c + 1) // 2 for c in batch.segments.completions)
    return prompt * (prompt + 1) // 2 + own


class Bench:
    """Measures, prints and stores lines until the time is up."""

    def __init__(self, backbone: Backbone, prompt: EncodedPrompt, output: Path | None, deadline: float) -> None:
        self.backbone, self.prompt = backbone, prompt
        self._output, self._deadline = output, deadline
        self._results: list[dict[str, Any]] = []
        self._weights = _allocated(backbone.device)

    def say(self, **values: Any) -> None:
        """Print one result and store all of them."""
        self._results.append(values)
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        print(" ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)
        if self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(json.dumps(self._results, indent=1))

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Run a part unless the time is up; a failing one is reported and the next goes on."""
        if time.perf_counter() > self._deadline:
            print(f"{name}: skipped, the time is up", flush=True)
            return
        try:
            part()
        except Exception:
            print(f"{name}: {traceback.format_exc()}", flush=True)
            self.say(name=name, error=traceback.format_exc(limit=1))

    def measure(
        self, name: str, tokens: int, *, shared: bool = True, recompute: bool = True, fused: bool = True
    ) -> None:
        """One line: forward and backward of the group, three times."""
        self.attempt(f"{name} {tokens}", lambda: self._measure(name, tokens, shared, recompute, fused))

    def _measure(self, name: str, tokens: int, shared: bool, recompute: bool, fused: bool) -> None:
        backbone, device = self.backbone, self.backbone.device
        generator = torch.Generator().manual_seed(0)
        completions = [torch.randint(1000, 20_000, (tokens,), generator=generator).tolist() for _ in range(COMPLETIONS)]
        if shared:
            batches = [backbone.collate_row(self.prompt, completions)]
        elif fused:
            batches = [backbone.collate_row(self.prompt, [c]) for c in completions]
        else:
            batches = [backbone.collate([(self.prompt, c)], "right") for c in completions]
        backbone.set_gradient_checkpointing(recompute)
        usual = backbone._token_logprobs
        if not fused:
            backbone._token_logprobs = lambda hidden, token_ids: token_logprobs(  # type: ignore[method-assign]
                hidden, token_ids, backbone.logits, backbone.num_logits, 128 * 2**20
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            times = [self._pass(batches) for _ in range(3)]
        finally:
            backbone._token_logprobs = usual  # type: ignore[method-assign]
        seconds = min(times[1:])
        longest = max(batch.input_ids.numel() for batch in batches)
        needed, executed = flops(backbone, batches, recompute, not fused)
        line = Line(
            name,
            tokens,
            times[0],
            seconds,
            COMPLETIONS * (len(self.prompt.input_ids) + tokens) / seconds,
            sum(batch.input_ids.numel() for batch in batches) / seconds,
            torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0,
            (self._weights + backbone.activation_bytes(longest, recompute)) / GIB,
            needed / seconds / PEAK_FLOPS,
            executed / seconds / PEAK_FLOPS,
        )
        self.say(**asdict(line))

    def _pass(self, batches: Sequence[Batch]) -> float:
        for _, parameter in self.backbone.trainable_parameters():
            parameter.grad = None
        _synchronize(self.backbone.device)
        start = time.perf_counter()
        for batch in batches:
            (self.backbone.completion_logprobs(batch, POLICY).sum() / 1000).backward()
        _synchronize(self.backbone.device)
        return time.perf_counter() - start

    def agreement(self, tokens: int) -> None:
        """How far a shared row is from separate rows in the model's own precision, in nat per token."""
        completions = [[1000 + 7 * i + k for i in range(tokens)] for k in range(COMPLETIONS)]
        with torch.no_grad():
            row = self.backbone.completion_logprobs(self.backbone.collate_row(self.prompt, completions), POLICY)
            alone = torch.cat(
                [
                    self.backbone.completion_logprobs(self.backbone.collate([(self.prompt, c)], "right"), POLICY)
                    for c in completions
                ]
            )
        gap = (row - alone).abs()
        self.say(name="shared row against separate rows", mean_nat=float(gap.mean()), max_nat=float(gap.max()))

    def attention(self, tokens: int) -> None:
        """Forward and backward of one layer's causal attention by kernel: first call at a new length, later ones."""
        config = self.backbone.model.config.get_text_config()  # type: ignore[operator, union-attr]
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for length in (tokens, tokens + 13):
                heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
                query, key, value = (
                    torch.randn(1, n, length, config.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                    for n in heads
                )
                times = []
                for _ in range(6):
                    _synchronize(self.backbone.device)
                    start = time.perf_counter()
                    with sdpa_kernel(kernel):
                        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                        out.backward(torch.ones_like(out))
                    _synchronize(self.backbone.device)
                    times.append(1000 * (time.perf_counter() - start))
                self.say(name=f"attention {kernel.name}", length=length, first_ms=times[0], later_ms=min(times[1:]))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory with weights; default: the 8B shape, drawn at random")
    parser.add_argument("--tiny", action="store_true", help="a small model and short sequences, on the CPU")
    parser.add_argument("--backend", help="of torch.compile; default: inductor, with --tiny eager")
    parser.add_argument("--seconds", type=float, default=150, help="start no further line after so many")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    device = torch.device("cpu" if args.tiny or not torch.cuda.is_available() else "cuda")
    backbone = build(args, device)
    prompt = make_prompt(backbone, 60, (128, 96)) if args.tiny else make_prompt(backbone, 1150, (832, 800))
    bench = Bench(backbone, prompt, args.output, began + args.seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bench.say(
        name=name,
        torch=torch.__version__,
        prompt_tokens=len(prompt.input_ids),
        build_seconds=time.perf_counter() - began,
        weights_gib=_allocated(device) / GIB,
    )
    with torch.no_grad():  # image features into the cache, kernels into the process
        backbone.completion_logprobs(backbone.collate([(prompt, (1000, 1001))], "right"), POLICY)
    long, short = (48, 24) if args.tiny else (2048, 1024)
    bench.measure("separate rows", long, shared=False, fused=False)
    bench.measure("shared row", long, fused=False)
    bench.measure("+ fused head", long)
    bench.attempt("agreement", lambda: bench.agreement(short))
    backbone.compile_layers(args.backend or ("eager" if args.tiny else "inductor"))
    bench.measure("+ compiled layers", long)
    bench.measure("  without recomputing", long, recompute=False)
    backbone.round_adapters(True)
    bench.measure("+ rounded adapters", long)
    bench.measure("  without recomputing", long, recompute=False)
    bench.measure("  without recomputing", short, recompute=False)
    bench.measure("+ rounded adapters", short)
    if device.type == "cuda":
        bench.attempt("attention", lambda: bench.attention(len(prompt.input_ids) + long))
    bench.measure("the same in separate rows", long, shared=False, recompute=False)
    print(f"done in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
