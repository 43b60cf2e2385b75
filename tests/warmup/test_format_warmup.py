"""The format warm-up: rows in, Solver-form examples, a merged model that loads like its origin."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from warmup_factory import picture

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import RolesConfig
from trinity_vlm.errors import UserError
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.solver import Solver
from trinity_vlm.supervised import SupervisedExample
from trinity_vlm.types import Completion, Message, Prompt
from trinity_vlm.warmup import (
    PAPER_LORA,
    EpochBatches,
    WarmupRow,
    WarmupSettings,
    read_rows,
    run_warmup,
    solver_completion,
    solver_examples,
)

ROLES = RolesConfig(prompts="short")


@pytest.fixture
def solver():
    return Solver(PromptSet.load("short"), ROLES)


@pytest.fixture
def rows_file(tmp_path):
    """Three rows whose images are files beside the jsonl."""
    lines = []
    for i in range(3):
        picture(60 * i).pixels.save(tmp_path / f"{i}.png")
        row = {"image": f"{i}.png", "question": f"How many {i}?", "reference": str(i), "reasoning": f"I count {i}."}
        lines.append(json.dumps(row))
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_defaults_are_the_papers():
    """A.1: 3 epochs, batch 8, lr 2e-5, decay 0.1, warm-up ratio 0.1, 2,500 characters, LoRA 32/64 with dropout 0.05."""
    s = WarmupSettings()
    assert (s.epochs, s.batch_size, s.lr, s.weight_decay, s.warmup_ratio) == (3, 8, 2e-5, 0.1, 0.1)
    assert (s.reasoning_chars, s.seed) == (2_500, 42)
    assert (PAPER_LORA.rank, PAPER_LORA.alpha, PAPER_LORA.dropout) == (32, 64, 0.05)
    assert s.lora == PAPER_LORA


def test_warmup_end_to_end(rows_file, small_model, tmp_path):
    """The merged model loads from its directory, without adapters, and prefers what it was shown."""
    out = tmp_path / "warm"
    settings = WarmupSettings(epochs=25, batch_size=2, lr=3e-3, lora=PAPER_LORA.model_copy(update={"rank": 4}))
    report = run_warmup(rows_file, small_model, ROLES, out, settings)
    assert report.num_examples == 3
    assert report.final.step == 50
    assert {"config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja"} <= {
        f.name for f in out.iterdir()
    }
    rows, solver = read_rows(rows_file), Solver(PromptSet.load("short"), ROLES)
    examples, _ = solver_examples(rows, solver, 2_500)
    before, after = (
        mean_logprob(Backbone.load(small_model.model_copy(update={"path": path}), None), examples)
        for path in (small_model.path, str(out))
    )
    assert after > before + 1.0


def mean_logprob(backbone, examples):
    pairs = [(backbone.encode(e.prompt), backbone.tokenizer(e.completion)["input_ids"]) for e in examples]
    with torch.no_grad():
        batch = backbone.collate(pairs, "right")
        return float(backbone.completion_logprobs(batch, None).sum() / batch.completion_mask.sum())


def test_parquet_rows_equal_jsonl_rows(rows_file, tmp_path):
    """Image bytes in a struct, as data sets store them, give the same pixels and texts."""
    rows = read_rows(rows_file)
    table = pa.table(
        {
            "image": [{"bytes": (rows_file.parent / f"{i}.png").read_bytes(), "path": None} for i in range(3)],
            "question": [r.question for r in rows],
            "reference": [r.reference for r in rows],
            "reasoning": [r.reasoning for r in rows],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    for a, b in zip(rows, read_rows(tmp_path / "rows.parquet"), strict=True):
        assert a.image.pixels.tobytes() == b.image.pixels.tobytes()
        assert replace(a, image=b.image) == b


def test_reasoning_is_cut_and_the_form_is_kept(solver):
    """5,000 characters of reasoning become 2,500, and the completion still parses to the reference."""
    (example,), left_out = solver_examples(
        [WarmupRow(picture(9), "How many?", r"\frac{1}{2}", "x" * 5_000)], solver, 2_500
    )
    assert not left_out
    parsed = solver.parse(Completion((), (), example.completion, "stop"))
    assert parsed.reasoning == "x" * 2_500
    assert parsed.answer == r"\frac{1}{2}"


@pytest.mark.parametrize(
    ("reasoning", "error"),
    [
        (r"so \boxed{3}", "box_outside_answer"),
        ("a </think> b", "ambiguous_thinking"),
        ("a <think> b", "ambiguous_thinking"),
    ],
)
def test_rows_that_break_the_form_are_left_out_by_name(solver, reasoning, error):
    """A teacher that boxes inside its reasoning would teach a malformed solution: counted, not trained on."""
    examples, left_out = solver_examples([WarmupRow(picture(9), "How many?", "3", reasoning)], solver, 2_500)
    assert examples == []
    assert left_out == {error: 1}


def test_solver_completion_by_hand():
    assert solver_completion(" two and one \n", "3") == "two and one\n</think>\n<answer>\\boxed{3}</answer>"


def test_every_epoch_holds_every_example_once():
    """Ten examples in batches of four: 4, 4, 2 per epoch, another order each epoch, the same for the same seed."""
    examples = [SupervisedExample(Prompt((Message("user", str(i)),)), str(i)) for i in range(10)]
    source = EpochBatches(examples, 3, 4, seed=1)
    assert len(source) == 9
    batches = [[e.completion for e in source.batch(i)] for i in range(9)]
    assert [len(b) for b in batches] == [4, 4, 2] * 3
    epochs = [[text for batch in batches[i : i + 3] for text in batch] for i in (0, 3, 6)]
    assert all(sorted(e) == sorted(map(str, range(10))) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = EpochBatches(examples, 3, 4, seed=1)
    assert [e.completion for e in again.batch(4)] == batches[4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 1: not valid JSON"),
        ("[1]", "line 1: expected an object, found list"),
        ('{"image": "0.png", "question": "q", "reference": "1"}', "row 1: reasoning missing or empty"),
        ('{"image": "no.png", "question": "q", "reference": "1", "reasoning": "r"}', "row 1: image: missing_file"),
    ],
)
def test_unusable_rows_name_file_row_and_column(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    with pytest.raises(UserError, match=message) as caught:
        read_rows(file)
    assert "rows.jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "rows.csv"])
def test_unusable_files_are_refused(tmp_path, name):
    if name == "rows.csv":
        (tmp_path / name).write_text("a,b")
    with pytest.raises(UserError, match=r"jsonl or \.parquet"):
        read_rows(tmp_path / name)


def test_a_file_without_a_usable_row_is_refused(tmp_path, small_model):
    """Nothing to train on is said before a model is loaded, with the reasons counted."""
    picture(5).pixels.save(tmp_path / "0.png")
    row = {"image": "0.png", "question": "q", "reference": "1", "reasoning": r"\boxed{1}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="box_outside_answer"):
        run_warmup(tmp_path / "rows.jsonl", small_model, ROLES, tmp_path / "out")
