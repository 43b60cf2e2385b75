"""The embedded checkpoint: complete, small, unchanged, and loadable like any Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import load_config
from trinity_vlm.environments.microcosm.vocabulary import CELLS, COLOURS, SHAPES, SIZES
from trinity_vlm.tiny.architecture import IMAGE_TOKENS
from trinity_vlm.tiny.build import MAX_BYTES
from trinity_vlm.tiny.curriculum import RolePrompts, tiny_roles, warmup_mix
from trinity_vlm.tiny.demonstrations import demonstrations
from trinity_vlm.tiny.tokenizer import PLAIN_TOKENS, SPECIAL_TOKENS, VOCABULARY_SIZE, packaged_words

CHECKPOINT = Path(str(resources.files("trinity_vlm.tiny") / "checkpoint"))


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def backbone():
    return Backbone.load(load_config("tiny").model.model_copy(update={"device": "cpu"}), None)


def test_files_match_their_checksums():
    """Every shipped file is listed, and none has changed since it was built."""
    listed = dict(reversed(line.split()) for line in (CHECKPOINT / "SHA256SUMS").read_text().splitlines())
    present = {f.name for f in CHECKPOINT.iterdir()} - {"SHA256SUMS"}
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((CHECKPOINT / name).read_bytes()).hexdigest() == digest, name


def test_it_is_small_bfloat16_and_complete():
    """At most 12 MiB, weights in bfloat16, about five million parameters, with card and log."""
    assert sum(f.stat().st_size for f in CHECKPOINT.iterdir()) <= MAX_BYTES
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert 4.5e6 < sum(t.numel() for t in tensors) < 6e6
    events = [json.loads(line)["event"] for line in (CHECKPOINT / "log.jsonl").read_text().splitlines()]
    assert {"start", "progress", "saved"} <= set(events)
    assert "evolve-heldout" in (CHECKPOINT / "README.md").read_text()


def test_it_loads_as_plain_qwen3_vl():
    """AutoModel, AutoTokenizer and AutoImageProcessor know every file without this package's help."""
    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    processor = AutoImageProcessor.from_pretrained(CHECKPOINT)
    assert (processor.patch_size, processor.merge_size) == (8, 2)


def test_the_processor_file_is_whole():
    """Where torchvision exists AutoProcessor needs the video part too."""
    values = json.loads((CHECKPOINT / "processor_config.json").read_text())
    assert values["processor_class"] == "Qwen3VLProcessor"
    assert values["image_processor"]["size"] == {"shortest_edge": 16_384, "longest_edge": 16_384}
    assert values["video_processor"]["video_processor_type"] == "Qwen3VLVideoProcessor"


@pytest.mark.parametrize("size", [(128, 128), (500, 500), (40, 40)])
def test_every_square_image_is_64_tokens(backbone, size):
    """Also a user's own picture: resized to 128 x 128."""
    from PIL import Image

    from trinity_vlm.types import ImageRecord

    prompt = RolePrompts(tiny_roles()).solver.prompt(ImageRecord("x", Image.new("RGB", size)), "How many?")
    image_id = backbone.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert backbone.encode(prompt).input_ids.count(image_id) == IMAGE_TOKENS == 64


def test_vocabulary_is_exactly_2048_with_the_qwen_tokens(tokenizer):
    """Control tokens are special; thinking and answer tags are plain, so that decoding keeps them."""
    assert len(tokenizer) == VOCABULARY_SIZE == 2048
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    assert special == set(SPECIAL_TOKENS)
    for token in PLAIN_TOKENS:
        (token_id,) = tokenizer(token)["input_ids"]
        assert tokenizer.decode([token_id], skip_special_tokens=True) == token
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_cells_words_and_digits(tokenizer):
    """A cell is one token with and without a space, as is every word of the microcosm; digits stand alone."""
    for text in [*CELLS, *COLOURS, *SHAPES, *SIZES]:
        assert len(tokenizer.tokenize(f" {text}")) == 1, text
    for cell in CELLS:
        assert len(tokenizer.tokenize(cell)) == 1, cell
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]
    assert len(tokenizer.tokenize("e5")) == 2


def test_edit_and_premise_words_fit(tokenizer):
    """The packaged words cost few tokens each: later recipes' commands and claims stay short."""
    words = [w for w in packaged_words() if re.fullmatch("[a-z]+", w)]
    costs = [len(tokenizer.tokenize(f" {w}")) for w in words]
    assert max(costs) <= 3
    assert sum(costs) < 1.5 * len(costs)


@given(st.text(max_size=60))
def test_every_text_round_trips(text):
    """Whatever has no merge falls back to bytes."""
    tokenizer = embedded_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@cache
def embedded_tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_prompts_and_completions_fit_the_preset(backbone):
    """The longest of 1,200 demonstrations leaves room in the tiny preset's budgets."""
    preset, prompts = load_config("tiny"), RolePrompts(tiny_roles())
    for index in range(300):
        for d in demonstrations(warmup_mix(), 77, index):
            budget = preset.roles.policy_tokens if d.call in ("propose", "solve") else preset.roles.verifier_tokens
            completion = len(backbone.tokenizer(d.completion)["input_ids"]) + 1
            assert completion <= budget, (d.call, d.case)
            texts = "".join(m.text for m in prompts.prompt(d).messages)
            assert len(backbone.tokenizer(texts)["input_ids"]) + 64 + 32 + budget <= preset.model.context


def test_it_solves_what_it_looks_at(backbone):
    """Sampled on 48 base problems: both habits occur, and of the answers it worked out at least four in five are right.

    Measured on 1,024 problems: about 98 % of these, and 45 % of those it only glanced at.
    """
    from trinity_vlm.tiny.measure import measure_backbone

    metrics = measure_backbone(backbone, tiny_roles()).solver("base-heldout", 48, greedy=False)
    assert 0.2 < metrics["solver/glanced_sampled"] < 0.7
    assert metrics["solver/accuracy_looked"] >= 0.8
    assert metrics["solver/format_sampled"] >= 0.9
