"""The paper's format warm-up (A.1): a few hundred solved questions teach a backbone the Solver's form.

    rows (image, question, reference, teacher reasoning) -> examples in Solver form -> LoRA training -> merged model

The same trainer, in full-parameter mode, builds the embedded checkpoint (``trinity_vlm.tiny.build``).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyarrow.parquet as pq

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import LoraConfig, ModelConfig, RolesConfig
from trinity_vlm.errors import UserError
from trinity_vlm.images.decode import BadImage, DecodeLimits, ImageData, decode_image
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.solver import Solver
from trinity_vlm.roles.text import THINK_CLOSE, one_line
from trinity_vlm.supervised import Progress, Schedule, SupervisedExample, SupervisedSettings, train_supervised
from trinity_vlm.supervised.saving import save_directory
from trinity_vlm.types import Completion, ImageRecord

COLUMNS = ("image", "question", "reference", "reasoning")
PAPER_LORA = LoraConfig(rank=32, alpha=64, dropout=0.05, targets="all-linear")
_LIMITS = DecodeLimits(min_side=1, max_pixels=200_000_000, max_aspect_ratio=100.0)


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """Defaults are the paper's (A.1). ``lora`` None trains every parameter.

    ``reasoning_chars``: a teacher's reasoning is cut to this many characters.
    """

    epochs: int = 3
    batch_size: int = 8
    lr: float = 2e-5
    weight_decay: float = 0.1
    warmup_ratio: float = 0.1
    reasoning_chars: int = 2_500
    seed: int = 42
    lora: LoraConfig | None = PAPER_LORA


@dataclass(frozen=True, slots=True)
class WarmupRow:
    """One solved question: the teacher's reasoning leads to ``reference``."""

    image: ImageRecord
    question: str
    reference: str
    reasoning: str


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up used: examples kept, rows left out by reason, and where training ended."""

    num_examples: int
    left_out: Mapping[str, int]
    final: Progress


def run_warmup(
    data: Path,
    model: ModelConfig,
    roles: RolesConfig,
    out: Path,
    settings: WarmupSettings = WarmupSettings(),
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> WarmupReport:
    """Train ``model`` on the rows of ``data`` (.jsonl or .parquet) and write the merged model to ``out``.

    Raises UserError for a file that can't be used, or when no row can be written in the Solver's form.
    """
    solver = Solver(PromptSet.load(roles.prompts), roles)
    examples, left_out = solver_examples(read_rows(data), solver, settings.reasoning_chars)
    if not examples:
        raise UserError(f"{data}: none of its rows fits the Solver's form ({dict(left_out)})")
    backbone = Backbone.load(model, settings.lora, settings.seed)
    source = EpochBatches(examples, settings.epochs, settings.batch_size, settings.seed)
    schedule = Schedule(settings.lr, len(source), warmup=math.ceil(settings.warmup_ratio * len(source)))
    supervised = SupervisedSettings(schedule, weight_decay=settings.weight_decay, report_every=5)
    final = train_supervised(backbone, source, model, supervised, on_progress)
    save_directory(backbone, model.path, out)
    return WarmupReport(len(examples), left_out, final)


def solver_examples(
    rows: Sequence[WarmupRow], solver: Solver, reasoning_chars: int
) -> tuple[list[SupervisedExample], Counter[str]]:
    """Rows in Solver form, and a count of those left out by the rule of the form that they break.

    A row is kept only if the Solver's own parser accepts the completion and reads the reference back from it.
    """
    examples, left_out = [], Counter[str]()
    for row in rows:
        prompt = solver.prompt(row.image, row.question)
        text = solver_completion(row.reasoning[:reasoning_chars], row.reference)
        parsed = solver.parse(Completion((), (), text, "stop"))
        if parsed.error:
            left_out[parsed.error] += 1
        elif parsed.answer != one_line(row.reference):
            left_out["reference_changed"] += 1
        else:
            examples.append(SupervisedExample(prompt, text))
    return examples, left_out


def solver_completion(reasoning: str, answer: str) -> str:
    """What follows the thinking prefix: reasoning, closing tag, boxed answer."""
    return f"{reasoning.strip()}\n{THINK_CLOSE}\n<answer>\\boxed{{{answer}}}</answer>"


class EpochBatches:
    """Every example once an epoch, in an order drawn from (seed, epoch); the last batch of an epoch may be smaller."""

    def __init__(self, examples: Sequence[SupervisedExample], epochs: int, batch_size: int, seed: int) -> None:
        self._examples = examples
        self._epochs = epochs
        self._batch_size = batch_size
        self._seed = seed

    def __len__(self) -> int:
        return self._epochs * self._per_epoch

    @property
    def _per_epoch(self) -> int:
        return math.ceil(len(self._examples) / self._batch_size)

    def batch(self, index: int) -> list[SupervisedExample]:
        epoch, position = divmod(index, self._per_epoch)
        order = list(range(len(self._examples)))
        Random(f"{self._seed}:{epoch}").shuffle(order)
        return [self._examples[i] for i in order[position * self._batch_size :][: self._batch_size]]


def read_rows(path: Path) -> list[WarmupRow]:
    """Rows of a .jsonl (``image`` is a path, relative to the file) or .parquet (``image`` is bytes, or a struct of
    bytes and path). Raises UserError naming file, row and column for anything missing or unreadable."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected .jsonl or .parquet with the columns {', '.join(COLUMNS)}")
    if path.suffix == ".jsonl":
        values = [_json_row(path, number, line) for number, line in enumerate(path.read_text().splitlines(), 1)]
    elif path.suffix == ".parquet":
        values = pq.read_table(path).to_pylist()
    else:
        raise UserError(f"{path}: expected .jsonl or .parquet, found {path.suffix or 'no suffix'}")
    return [_row(path, number, value) for number, value in enumerate(values, 1)]


def _json_row(path: Path, number: int, line: str) -> Mapping[str, object]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
    return value


def _row(path: Path, number: int, value: Mapping[str, object]) -> WarmupRow:
    missing = [name for name in COLUMNS if not value.get(name)]
    if missing:
        raise UserError(f"{path}, row {number}: {', '.join(missing)} missing or empty; a row has {', '.join(COLUMNS)}")
    try:
        pixels = decode_image(_image_data(path, value["image"]), _LIMITS)
    except BadImage as error:
        raise UserError(f"{path}, row {number}: image: {error}") from None
    question, reference, reasoning = (str(value[name]).strip() for name in COLUMNS[1:])
    return WarmupRow(ImageRecord(f"{path.name}#{number}", pixels), question, reference, reasoning)


def _image_data(path: Path, value: object) -> ImageData:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return value if isinstance(value, bytes) else path.parent / str(value)
