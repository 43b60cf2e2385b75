"""TRL's GRPOTrainer on the same model and the same load as benchmarks/outer_step.py: seconds, tokens/s, memory.

    python benchmarks/trl_grpo.py --model /dev/shm/qwen3-vl-8b [--tokens 512] [--vllm] [--out FILE.json]
    python benchmarks/trl_grpo.py --model build/qwen3-vl-tiny --tiny          # the same code on a CPU, 1 to 3 minutes

Needs TRL 1.12 (its range holds vLLM 0.26) with transformers, peft and datasets. A model directory that doesn't exist is
made first (benchmarks/eight_billion.py): Qwen3-VL-8B's shape with random weights.

16 images of 800 x 800, G = 4: 64 completions of exactly ``--tokens`` tokens are generated and trained per step; LoRA
of rank 32 on the language model, bfloat16, gradient checkpointing, random rewards (so that no advantage is 0).
Generation is transformers' own, or vLLM in the trainer's process with ``--vllm`` (TRL's "colocate": merged weights are
copied into the engine before every generation; that copying is printed apart). Loading is not counted.

Per step, "other" holds rewards, old log-probs (with vLLM) and batching; "update" is forward, backward, optimizer.
"""

import argparse
import json
import random
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu import GpuWatch
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback, set_seed

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version
except ModuleNotFoundError as error:  # --help needs neither
    if error.name not in ("datasets", "trl"):
        raise
    Dataset, GRPOConfig, GRPOTrainer, trl_version = Any, Any, object, None

TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
GROUP = 4
PROMPT = (
    "Look at the image with care and answer the question. Reason step by step first: name what is relevant, where it "
    "is in the image and what follows from it; then check the result once more. Give the final answer on the last "
    "line, as short as possible, in a box. Question {number}: how many separate bright areas can be told apart, which "
    "of them is the largest, and in which quarter of the image does its centre lie?"
)


class TimedTrainer(GRPOTrainer):
    """Seconds of each part of a step, by the methods that do them; a GPU is waited for at every border."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.seconds = dict.fromkeys(("sync", "generate", "rollouts"), 0.0)
        super().__init__(*arguments, **options)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.counted("sync", self.vllm_generation.sync_weights)

    def counted(self, part: str, work: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            start = now()
            try:
                return work(*arguments, **options)
            finally:
                self.seconds[part] += now() - start

        return run

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        return self.counted("generate", super()._generate_single_turn)(*arguments, **options)

    def _generate_and_score_completions(self, *arguments: Any, **options: Any) -> Any:
        return self.counted("rollouts", super()._generate_and_score_completions)(*arguments, **options)


class Report(TrainerCallback):
    """Prints each step as it ends and keeps its numbers."""

    def __init__(self, options: argparse.Namespace, head: dict[str, object]) -> None:
        self.options = options
        self.head = head
        self.steps: list[dict[str, float]] = []
        self.trainer: TimedTrainer | None = None
        self.watch = GpuWatch()
        self.begun = 0.0

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        assert self.trainer is not None
        self.trainer.seconds = dict.fromkeys(self.trainer.seconds, 0.0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.begun = now()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        assert self.trainer is not None
        end = now()
        seconds = self.trainer.seconds
        completions = GROUP * self.options.images
        metrics = self.trainer._metrics["train"]
        length = metrics["completions/mean_length"][-1]
        generated, trained = completions * length, metrics["num_tokens"][-1] - sum(s["tokens"] for s in self.steps)
        step, generate = end - self.begun, seconds["generate"] - seconds["sync"]
        update = step - seconds["rollouts"]
        numbers = {
            "seconds/step": step,
            "seconds/sync": seconds["sync"],
            "seconds/generate": generate,
            "seconds/other": seconds["rollouts"] - seconds["generate"],
            "seconds/update": update,
            "completions": completions,
            "completion_length": length,
            "tokens": trained,
            "generated_tokens_per_s": generated / generate,
            "update_tokens_per_s": trained / update,
            **self.watch.between(self.begun, end),
        }
        if torch.cuda.is_available():
            numbers["torch_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.steps.append(numbers)
        print(*(f"{key:<24} {value:.4g}" for key, value in numbers.items()), sep="\n", flush=True)
        if self.options.out:
            self.options.out.write_text(json.dumps({**self.head, "steps": self.steps}, indent=1))


def main() -> None:
    options = parse_options()
    set_seed(0)
    prepare(options.model, options.tiny)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head: dict[str, object] = {
        **{"device": device, "torch": torch.__version__, "trl": trl_version},
        **{"generation": "vllm" if options.vllm else "transformers", "micro_batch": options.micro_batch},
    }
    print(*(f"{key} {value}" for key, value in head.items()), sep=", ", flush=True)
    report = Report(options, head)
    try:
        trainer = make_trainer(options, report)
        with report.watch:
            trainer.train()
        print("logged:", *(entry for entry in trainer.state.log_history[:-1]), sep="\n", flush=True)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="few small images and short completions")
    parser.add_argument("--tokens", type=int, help="of every completion; 512 unless --tiny")
    parser.add_argument("--micro-batch", type=int, help="completions per forward pass; 8 unless --tiny")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--vllm-memory", type=float, default=0.35, help="part of the GPU for the engine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if trl_version is None:
        parser.error("TRL is missing: pip install trl==1.12.0 datasets")
    options.images, options.side = (4, 256) if options.tiny else (16, 800)
    options.tokens = options.tokens or (12 if options.tiny else 512)
    options.micro_batch = options.micro_batch or (4 if options.tiny else 8)
    return options


def prepare(folder: Path, tiny: bool) -> None:
    """Make the model directory unless it is there."""
    if (folder / "config.json").exists():
        return
    from eight_billion import random_weights, write_config

    write_config(folder, tiny)
    random_weights(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def make_trainer(options: argparse.Namespace, report: Report) -> TimedTrainer:
    processor = AutoProcessor.from_pretrained(options.model, padding_side="left", truncation_side="left")
    model = AutoModelForImageTextToText.from_pretrained(
        options.model, dtype=torch.bfloat16, device_map={"": "cuda" if torch.cuda.is_available() else "cpu"}
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=random_reward,
        args=grpo_config(options, processor),
        train_dataset=make_dataset(options.images, options.side),
        processing_class=processor,
        peft_config=LoraConfig(r=32, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"),
        callbacks=[report],
    )
    report.trainer = trainer
    trainer.model.print_trainable_parameters()
    return trainer


def grpo_config(options: argparse.Namespace, processor: Any) -> GRPOConfig:
    """64 completions a step in micro-batches; image tokens are never sampled, the end not before the last token."""
    banned = processor.tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    if options.vllm:
        forced = {"min_tokens": options.tokens, "logit_bias": dict.fromkeys(banned, -100.0)}
    else:
        forced = {"min_new_tokens": options.tokens, "suppress_tokens": banned}
    return GRPOConfig(
        output_dir=str(options.model.parent / "trl-output"),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=GROUP * options.images // options.micro_batch,
        num_generations=GROUP,
        max_completion_length=options.tokens,
        generation_kwargs=forced,
        temperature=1.0,
        learning_rate=1e-5,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        seed=0,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.vllm_memory,
        vllm_max_model_length=4096 if options.vllm else None,
    )


def make_dataset(images: int, side: int) -> Dataset:
    """Smooth random pictures, each with one question."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (images, 12, 12, 3), dtype=np.uint8)
    rows = [
        {
            "prompt": [{"role": "user", "content": PROMPT.format(number=number)}],
            "image": Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC),
        }
        for number, pixels in enumerate(coarse)
    ]
    return Dataset.from_list(rows)


def random_reward(completions: list[Any], **_: Any) -> list[float]:
    return [random.random() for _ in completions]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
