"""Build the embedded checkpoint from nothing: tokenizer, weights, measurements, card.

    python -m trinity_vlm.tiny.build --out DIR --minutes 5 --seed 0

Writes DIR/checkpoint (a Hugging Face directory in bfloat16 with card, log and SHA256SUMS) and measurements.json. Data
and their order depend on the seed only; how far training gets in the given minutes depends on the machine, so the log
names the number of steps, and ``--steps`` repeats a build exactly (up to the device's own rounding).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from rich.console import Console

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import ModelConfig, load_config
from trinity_vlm.environments.microcosm import EVOLVE_STYLE
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.supervised import Progress, Schedule, SupervisedSettings, train_supervised
from trinity_vlm.supervised.saving import save_directory
from trinity_vlm.tiny.architecture import DEFAULT_SIZE, TinySize, build_model, processor_config
from trinity_vlm.tiny.card import card
from trinity_vlm.tiny.curriculum import DemonstrationSource, refinement_mix, role_prompts, tiny_roles, warmup_mix
from trinity_vlm.tiny.demonstrations import DemonstrationMix, demonstrations
from trinity_vlm.tiny.measure import Metrics, measure_backbone, table
from trinity_vlm.tiny.tokenizer import train_tokenizer
from trinity_vlm.types import CallType

CALIBRATION_STEPS = 60
REPORT_EVERY = 50
EVALUATIONS = 2
EVALUATION_PROBLEMS = 256
MEASURED_SPLITS = ("base-heldout", "evolve-heldout")
TOKENIZER_IMAGES = 1_000
TOKENIZER_SEED = 900_001
MAX_BYTES = 12 * 2**20


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Settings of the shipped build. A batch is ``images_per_batch`` images with four examples each."""

    seed: int = 0
    images_per_batch: int = 128
    lr: float = 1.5e-3
    warmup_steps: int = 200
    floor: float = 0.02
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    num_workers: int = max(0, (os.cpu_count() or 1) - 2)
    size: TinySize = DEFAULT_SIZE


class Log:
    """log.jsonl: one object a line, echoed to the terminal; begins with the lines of ``earlier`` when that exists."""

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._path.write_text(earlier.read_text() if earlier is not None and earlier.is_file() else "")

    def write(self, event: str, **values: object) -> None:
        line = json.dumps({"event": event, **values}, default=str)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def tokenizer_texts() -> Iterator[str]:
    """Everything the model will read or write: prompts of the shipped sets, and demonstrations of every call."""
    for name in ("paper", "short"):
        prompts = PromptSet.load(name)
        yield from [prompts.text(call, "system") for call in CallType]
    yield from ["system\n", "user\n", "assistant\n"] * 100
    roles, mix = tiny_roles(), warmup_mix()
    prompts_of = role_prompts(roles.prompts, roles.thinking_prefix)
    for index in range(TOKENIZER_IMAGES):
        for demonstration in demonstrations(mix, TOKENIZER_SEED, index):
            yield from [message.text for message in prompts_of.prompt(demonstration).messages]
            yield demonstration.completion


def write_initial(directory: Path, seed: int, size: TinySize = DEFAULT_SIZE) -> ModelConfig:
    """A directory with a fresh tokenizer and random weights; returns the configuration that loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(tokenizer_texts())
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(processor_config(), indent=2))
    build_model(tokenizer, seed, size).save_pretrained(directory)
    return _model_config(directory)


def _model_config(directory: Path) -> ModelConfig:
    return load_config("tiny").model.model_copy(update={"path": str(directory)})


def train(
    backbone: Backbone,
    model: ModelConfig,
    settings: BuildSettings,
    steps: int,
    on_progress: Callable[[Progress], None],
    mix: DemonstrationMix | None = None,
) -> Progress:
    """Train for ``steps`` batches of ``mix`` (unset: the warm-up's)."""
    source = DemonstrationSource(mix or warmup_mix(), tiny_roles(), settings.seed, steps, settings.images_per_batch)
    schedule = Schedule(settings.lr, steps, min(settings.warmup_steps, steps // 5), settings.floor)
    supervised = SupervisedSettings(
        schedule, settings.weight_decay, settings.betas, num_workers=settings.num_workers, report_every=REPORT_EVERY
    )
    return train_supervised(backbone, source, model, supervised, on_progress)


def build(out: Path, settings: BuildSettings, steps: int) -> None:
    """Train, save, measure; see the module's docstring for what is written."""
    log = Log(out / "log.jsonl")
    train_checkpoint(out, settings, steps, log)
    measurer = measure_backbone(Backbone.load(_model_config(out / "checkpoint"), None), tiny_roles())
    reports = {split: measurer.report(split) for split in MEASURED_SPLITS}
    log.write("measured", **reports)
    document(out, reports)
    Console().print(table(reports))


def train_checkpoint(out: Path, settings: BuildSettings, steps: int, log: Log) -> None:
    """Write ``out``/initial (random weights) and ``out``/checkpoint (trained, bfloat16)."""
    log.write("start", stage="warm-up", settings=asdict(settings), steps=steps, mix=asdict(warmup_mix()), **versions())
    model = write_initial(out / "initial", settings.seed, settings.size)
    backbone = Backbone.load(model, None)
    log.write("model", device=str(backbone.device), dtype=str(backbone.dtype), trainable=backbone.describe_trainable())
    measurer = measure_backbone(backbone, tiny_roles())
    evaluate_every = max(1, steps // EVALUATIONS // REPORT_EVERY) * REPORT_EVERY

    def report(progress: Progress) -> None:
        log.write("progress", **asdict(progress), examples_per_second=round(progress.examples_per_second))
        if progress.step % evaluate_every == 0:
            log.write("evaluation", step=progress.step, **measurer.solver("base-heldout", EVALUATION_PROBLEMS))

    train(backbone, model, settings, steps, report)
    save_directory(backbone, model.path, out / "checkpoint", torch.bfloat16)
    log.write("saved", parameters=sum(p.numel() for _, p in backbone.trainable_parameters()))


def refine(start: Path, out: Path, settings: BuildSettings, steps: int) -> None:
    """Train the checkpoint in ``start`` on the refinement mix, its vision tower frozen; write ``out``/checkpoint.

    ``settings.seed`` should differ from the first stage's, whose images would come again otherwise.
    """
    log = Log(out / "log.jsonl", start / "log.jsonl")
    log.write(
        "start", stage="refine", settings=asdict(settings), steps=steps, mix=asdict(refinement_mix()), **versions()
    )
    model = _model_config(start)
    backbone = Backbone.load(model, None)
    for name, parameter in backbone.trainable_parameters():
        parameter.requires_grad_("visual" not in name)

    def report(progress: Progress) -> None:
        log.write("progress", **asdict(progress), examples_per_second=round(progress.examples_per_second))

    train(backbone, model, settings, steps, report, refinement_mix())
    save_directory(backbone, model.path, out / "checkpoint", torch.bfloat16)
    log.write("saved", parameters=sum(p.numel() for _, p in backbone.trainable_parameters()))


def document(out: Path, reports: Mapping[str, Metrics]) -> None:
    """Put measurements, card, log and checksums beside the weights of ``out``/checkpoint."""
    checkpoint = out / "checkpoint"
    (out / "measurements.json").write_text(json.dumps(reports, indent=1))
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (checkpoint / "README.md").write_text(card(reports, events, EVOLVE_STYLE))
    shutil.copyfile(out / "log.jsonl", checkpoint / "log.jsonl")
    write_sums(checkpoint)


def calibrated_steps(minutes: float, settings: BuildSettings, directory: Path) -> int:
    """How many steps fit into ``minutes`` of training on this machine, from a short throw-away run."""
    model = write_initial(directory, settings.seed, settings.size)
    progress = train(Backbone.load(model, None), model, settings, CALIBRATION_STEPS, lambda progress: None)
    return max(1, int(minutes * 60 * progress.step / progress.seconds))


def versions() -> dict[str, str]:
    """What the numbers depend on besides the seed."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": gpu,
        "date": time.strftime("%Y-%m-%d"),
    }


def write_sums(directory: Path) -> None:
    """SHA256SUMS over every file of a checkpoint. Raises ValueError when it is too large to ship in the package."""
    files = sorted(f for f in directory.iterdir() if f.is_file() and f.name != "SHA256SUMS")
    if (size := sum(f.stat().st_size for f in files)) > MAX_BYTES:
        raise ValueError(f"{directory} holds {size:,} bytes, more than the {MAX_BYTES:,} the package may carry")
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    (directory / "SHA256SUMS").write_text("".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    defaults = BuildSettings()
    parser = argparse.ArgumentParser(description="Build the embedded checkpoint (minutes on a GPU, hours on a CPU).")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument(
        "--minutes", type=float, default=4.5, help="time to train; steps follow from a short calibration"
    )
    parser.add_argument("--steps", type=int, help="train exactly this many steps instead")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--workers", type=int, default=defaults.num_workers, help="processes that make batches")
    given = parser.parse_args(arguments)
    settings = replace(defaults, seed=given.seed, num_workers=given.workers)
    steps = given.steps or calibrated_steps(given.minutes, settings, given.out / "initial")
    build(given.out, settings, steps)


if __name__ == "__main__":
    main()
