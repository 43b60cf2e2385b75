"""Schemas enforced during decoding: an untrained model's verdicts parse, in the layout of json.dumps."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
from tiny_families import ask, picture

from trinity_vlm.engine.constrained import Constraint, Grammars
from trinity_vlm.engine.decoding import Row, constrained
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.errors import EngineError
from trinity_vlm.types import CallType

SCREENING = {
    "type": "object",
    "properties": {
        "justification": {"type": "string", "maxLength": 40},
        "fact_q": {"enum": [0, 1]},
        "corr_a": {"enum": [0, 1]},
        "difficulty": {"enum": [0.1, 0.4, 0.7, 1.0]},
    },
    "required": ["justification", "fact_q", "corr_a", "difficulty"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(players):
    return Grammars(players.tokenizer, players.num_logits)


def allowed_ids(constraint):
    """Which ids may come next, as booleans; None: all."""
    mask = constraint.bitmask()
    return None if mask is None else np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)


def verdicts(players, number, **changes):
    engine = TransformersEngine(players, 64, False)
    settings = {"json_schema": SCREENING, "n": number, "sampling": Sampling(1.0, 1.0, 0, 220)} | changes
    request = GenerationRequest(
        prompt=ask("Judge.", picture(1)), adapter="verifier", seed=5, call=CallType.SCREEN, order_key=("x",), **settings
    )
    return asyncio.run(engine.generate(request))


def test_verdicts_of_an_untrained_model_all_parse(players):
    """Every completion ends by itself, parses, keeps the key order and the bounds."""
    completions = verdicts(players, 40)
    assert [c.finish_reason for c in completions] == ["stop"] * 40
    for completion in completions:
        value = json.loads(completion.text)
        assert list(value) == ["justification", "fact_q", "corr_a", "difficulty"]
        assert len(value["justification"]) <= 40
        assert value["fact_q"] in (0, 1)
        assert value["difficulty"] in (0.1, 0.4, 0.7, 1.0)
    assert len({c.text for c in completions}) > 30
    assert {json.loads(c.text)["fact_q"] for c in completions} == {0, 1}


def test_short_budgets_cut_verdicts_off_like_any_completion(players):
    """The schema does not stretch the budget."""
    completions = verdicts(players, 4, sampling=Sampling(1.0, 1.0, 0, 6))
    assert [(c.finish_reason, len(c.token_ids)) for c in completions] == [("length", 6)] * 4


@pytest.mark.parametrize(
    "value", [{"justification": 'a "b", c: é\n', "fact_q": 1, "corr_a": 0, "difficulty": 0.1}, {"justification": ""}]
)
def test_the_layout_of_json_dumps_is_accepted_token_by_token(players, grammars, value):
    """What a model trained on json.dumps output writes is allowed at every step, and complete at the end."""
    schema = SCREENING if "fact_q" in value else SCREENING | {"required": ["justification"]}
    constraint = Constraint(grammars, schema, None)
    for token in players.tokenizer(json.dumps(value, ensure_ascii=False), add_special_tokens=False)["input_ids"]:
        assert allowed_ids(constraint)[token]
        constraint.advance(token)
    assert allowed_ids(constraint)[players.tokenizer.eos_token_id]


@pytest.mark.parametrize("number", ["0.0", "0", "0.25", "0.5", "1.0", "1"])
def test_whole_floats_may_be_written_either_way(players, grammars, number):
    """A model that means 0.0 must not be led from "0." to 0.25; every level is reachable in both spellings."""
    levels = {"type": "number", "enum": [0.0, 0.25, 0.5, 1.0]}
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": "string"}, "score": levels},
        "required": ["a/b", "score"],
    }
    constraint = Constraint(grammars, schema, None)
    for token in players.tokenizer(f'{{"a/b": "", "score": {number}}}', add_special_tokens=False)["input_ids"]:
        assert allowed_ids(constraint)[token], players.tokenizer.decode([token])
        constraint.advance(token)
    assert allowed_ids(constraint)[players.tokenizer.eos_token_id]


def test_enumerated_words_with_delicate_characters(players, grammars):
    """Quotes, slashes and regex characters in enumerated strings stand for themselves."""
    words = ['a"b', "c/d", "e.f|g", "(h)"]
    schema = {"type": "object", "properties": {"w": {"enum": words}}, "required": ["w"]}
    for word, fine in [(w, True) for w in words] + [("exf|g", False), ("h", False)]:
        constraint = Constraint(grammars, schema, None)
        ids = players.tokenizer(json.dumps({"w": word}), add_special_tokens=False)["input_ids"]
        allowed = []
        for token in ids:
            allowed.append(bool(allowed_ids(constraint)[token]))
            if not allowed[-1]:
                break
            constraint.advance(token)
        assert all(allowed) is fine, word


def test_schemas_of_other_shapes_are_enforced_too(players, grammars):
    """Optional keys and arrays go to the library's own compiler."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    constraint = Constraint(grammars, schema, None)
    for token in players.tokenizer("[1, 2]", add_special_tokens=False)["input_ids"]:
        assert allowed_ids(constraint)[token]
        constraint.advance(token)
    assert allowed_ids(constraint)[players.tokenizer.eos_token_id]


def test_other_orders_and_layouts_are_refused(players, grammars):
    """Keys out of order and missing spaces are not in the language."""
    ids = players.tokenizer.encode
    start = Constraint(grammars, SCREENING, None)
    assert allowed_ids(start)[ids("{")[0]]
    assert not allowed_ids(start)[ids("[")[0]]
    for token in ids('{"'):
        start.advance(token)
    assert not allowed_ids(start)[ids("f")[0]]
    assert allowed_ids(start)[ids("justification")[0]]


def drive(constraint, ids):
    """Which steps were constrained."""
    steps = []
    for token in ids:
        allowed = allowed_ids(constraint)
        steps.append(allowed is not None)
        assert allowed is None or allowed[token]
        constraint.advance(token)
    return steps


def test_schema_after_a_marker(players, grammars):
    """Free until the thinking tag closes; then the object, also when the marker takes several tokens."""
    for marker in ("</think>", "DONE"):
        text = f'anything {{ "goes" }} {marker}{{"justification": "a", "fact_q": 0, "corr_a": 0, "difficulty": 1.0}}'
        ids = players.tokenizer(text, add_special_tokens=False)["input_ids"]
        free = len(players.tokenizer(text[: text.index(marker) + len(marker)], add_special_tokens=False)["input_ids"])
        constraint = Constraint(grammars, SCREENING, marker)
        assert drive(constraint, ids) == [False] * free + [True] * (len(ids) - free)
        assert allowed_ids(constraint)[players.tokenizer.eos_token_id]


def test_a_token_that_reaches_past_the_marker_counts_towards_the_object(grammars):
    """Overshoot is fed to the grammar; white space is skipped; what doesn't fit is left behind."""
    ids = grammars.tokenizer.encode
    for overshoot, following in ((' {"', "justification"), ("\n", "{"), ("xyz", "{")):
        constraint = Constraint(grammars, SCREENING, "#")
        constraint._matcher = constraint._begun(overshoot.lstrip())
        allowed = allowed_ids(constraint)
        assert allowed[ids(following)[0]]
        assert not allowed[ids("z")[0]]


def test_schema_after_in_the_engine(players):
    """A thinking call under the schema: wherever the marker appeared, an object follows."""
    completions = verdicts(players, 30, schema_after="a", sampling=Sampling(1.0, 1.0, 0, 230))
    done = [c.text for c in completions if c.finish_reason == "stop" and "a" in c.text]
    assert len(done) > 5
    assert all(list(json.loads(t[t.index("{", t.index("a")) :])) == list(SCREENING["properties"]) for t in done)


def test_a_schema_that_cannot_be_enforced_is_an_engine_error(players):
    """Reported for the request that brought it, before anything runs."""
    with pytest.raises(EngineError, match="can't be enforced"):
        verdicts(players, 1, json_schema={"type": "nonsense"})


def test_masks_cover_exactly_the_vocabulary(players, grammars):
    """Each row gets its own mask; rows without a token are forbidden, unconstrained rows untouched."""
    encoded = players.encode(ask("Judge."))
    rule = Sampling(1.0, 1.0, 0, 8)
    rows = [Row(encoded, rule, 0, 8, constraint=c) for c in (None, Constraint(grammars, SCREENING, None))]
    logits = constrained(torch.zeros(2, players.num_logits), rows)
    assert (logits[0] == 0).all()
    assert torch.equal(logits[1] == 0, torch.from_numpy(allowed_ids(rows[1].constraint)[: players.num_logits]))
    assert torch.isinf(logits[1, -3:]).all()
    assert 0 < (logits[1] == 0).sum() < 5
