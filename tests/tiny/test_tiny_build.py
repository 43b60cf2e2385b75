"""The curriculum and the pieces of the build around training."""

from __future__ import annotations

import json

import pytest

from trinity_vlm.environments.microcosm import EVOLVE_STYLE, parse_style
from trinity_vlm.tiny.architecture import TinySize, build_model
from trinity_vlm.tiny.build import Log, document, write_sums
from trinity_vlm.tiny.curriculum import (
    POLICY_STYLES,
    VERIFIER_STYLES,
    DemonstrationSource,
    RolePrompts,
    refinement_mix,
    tiny_roles,
    warmup_mix,
)
from trinity_vlm.tiny.demonstrations import demonstrations
from trinity_vlm.tiny.tokenizer import train_tokenizer
from trinity_vlm.types import CallType

POLICY_CALLS = {CallType.PROPOSE, CallType.SOLVE}


def test_the_policy_sees_the_base_style_only():
    """Headroom by construction: no policy example shows any other style, and none the style evolved on."""
    assert POLICY_STYLES == (("base", 1.0),)
    for mix in (warmup_mix(), refinement_mix()):
        for group in mix.groups:
            if {call for call, _ in group.calls} & POLICY_CALLS:
                assert group.styles == POLICY_STYLES
                assert {call for call, _ in group.calls} == POLICY_CALLS
    assert EVOLVE_STYLE not in {style for style, _ in VERIFIER_STYLES}


def test_weights_add_up_and_every_call_is_taught():
    for mix in (warmup_mix(), refinement_mix()):
        assert sum(group.share for group in mix.groups) == pytest.approx(1.0)
        assert {call for group in mix.groups for call, _ in group.calls} == set(CallType)
        assert all(sum(w for _, w in group.calls) == pytest.approx(1.0) for group in mix.groups)
    assert sum(weight for _, weight in VERIFIER_STYLES) == pytest.approx(1.0)
    assert all(parse_style(style) for style, _ in VERIFIER_STYLES)


def test_prompts_are_those_of_an_episode():
    """Each demonstration is asked by the role's own prompt method, thinking prefix where the call thinks."""
    prompts = RolePrompts(tiny_roles())
    seen = {}
    for index in range(60):
        for d in demonstrations(warmup_mix(), 3, index):
            seen.setdefault(d.call, (d, prompts.prompt(d)))
    assert set(seen) == set(CallType)
    thinking = {call for call, (_, prompt) in seen.items() if prompt.assistant_prefix}
    assert thinking == {CallType.PROPOSE, CallType.SOLVE, CallType.DISPUTE}
    demo, prompt = seen[CallType.DISPUTE]
    expected = prompts.verifier.dispute_prompt(
        prompt.image, demo.question, demo.answer, demo.majority_answer, demo.reasoning
    )
    assert prompt == expected
    assert seen[CallType.EQUIVALENCE][1].image is None


def test_batches_are_a_pure_function_of_the_seed():
    """The same index gives the same examples, another index or seed others; sizes are as configured."""
    source = DemonstrationSource(warmup_mix(), tiny_roles(), seed=4, num_batches=9, images_per_batch=2)
    again = DemonstrationSource(warmup_mix(), tiny_roles(), seed=4, num_batches=9, images_per_batch=2)
    other = DemonstrationSource(warmup_mix(), tiny_roles(), seed=5, num_batches=9, images_per_batch=2)

    def texts(batch):
        return [(e.prompt.messages[-1].text, e.completion) for e in batch]

    assert len(source) == 9
    assert len(source.batch(3)) == 8
    assert texts(source.batch(3)) == texts(again.batch(3))
    assert texts(source.batch(3)) != texts(source.batch(4))
    assert texts(source.batch(3)) != texts(other.batch(3))


def test_tokenizer_training_is_deterministic_and_exact():
    """Same texts, same vocabulary; texts too poor for the size are refused rather than padded."""
    texts = ["How many big red stars are there? a1 big red star = 1"] * 20
    first, second = (train_tokenizer(texts, size=600) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 600
    with pytest.raises(ValueError, match="instead of 50000"):
        train_tokenizer(texts, size=50_000)


def test_initial_weights_follow_the_seed():
    tokenizer = train_tokenizer(["a b c"] * 20, size=600)
    size = TinySize(64, 1, 64, 64, 1, 64, 1, 1, (0,))
    a, b, c = (build_model(tokenizer, seed, size).model.visual.pos_embed.weight for seed in (1, 1, 2))
    assert a.equal(b)
    assert not a.equal(c)


def test_document_writes_card_log_and_sums(tmp_path):
    """The card names every stage and number of the log; checksums cover card and log."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"weights")
    log = Log(tmp_path / "log.jsonl")
    machine = {"hardware": "abacus", "torch": "2.0", "transformers": "5.0", "date": "2026-11-30"}
    for stage, steps in (("warm-up", 10), ("refine", 4)):
        log.write("start", stage=stage, steps=steps, settings={"seed": 3}, **machine)
        log.write("progress", examples=steps * 100, seconds=7.0)
        log.write("saved", parameters=1234567)
    document(tmp_path, {"base-heldout": {"solver/accuracy": 0.5}, "evolve-heldout": {"solver/accuracy": 0.25}})
    card = (tmp_path / "checkpoint" / "README.md").read_text()
    assert "| warm-up | 10 | 1,000 | 7 | 3 | abacus |" in card
    assert "| refine | 4 | 400 | 7 | 3 | abacus |" in card
    assert "| solver/accuracy | 0.500 | 0.250 |" in card
    assert "1,234,567" in card
    assert EVOLVE_STYLE in card
    sums = (tmp_path / "checkpoint" / "SHA256SUMS").read_text()
    assert all(name in sums for name in ("README.md", "log.jsonl", "model.safetensors"))
    assert json.loads((tmp_path / "measurements.json").read_text())["base-heldout"] == {"solver/accuracy": 0.5}


def test_a_checkpoint_too_large_for_the_package_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * (12 * 2**20 + 1))
    with pytest.raises(ValueError, match="more than the 12,582,912"):
        write_sums(tmp_path)


def test_a_continued_log_begins_with_the_earlier_one(tmp_path):
    (tmp_path / "old.jsonl").write_text('{"event": "start"}\n')
    log = Log(tmp_path / "new.jsonl", tmp_path / "old.jsonl")
    log.write("saved", parameters=1)
    events = [json.loads(line)["event"] for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert events == ["start", "saved"]
