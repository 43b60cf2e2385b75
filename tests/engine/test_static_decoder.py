"""Fixed-shape decoding: the same tokens as the plain loop, through every kind of move between buckets."""

from __future__ import annotations

import pytest
import torch
from tiny_families import ask, load, picture, randomize

from trinity_vlm.engine import graphs
from trinity_vlm.engine.constrained import Constraint, Grammars
from trinity_vlm.engine.decoding import Row, decode
from trinity_vlm.engine.graphs import StaticDecoder
from trinity_vlm.engine.protocol import Sampling

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"enum": [0, 1]}},
    "required": ["a", "b"],
}


def rows(backbone, budgets, temperature=1.0, schema=False):
    """One row per budget over three prompts, an image-free one among them."""
    prompts = [
        backbone.encode(ask(t, i))
        for t, i in (("How many?", picture(1)), ("What colour is it?", picture(2)), ("b", None))
    ]
    grammars = Grammars(backbone.tokenizer, backbone.num_logits)
    return [
        Row(
            prompts[i % 3],
            Sampling(temperature, 0.95, 20 if i % 2 else 0, budget),
            seed=i,
            budget=budget,
            want_logprobs=True,
            constraint=Constraint(grammars, SCHEMA, None) if schema else None,
        )
        for i, budget in enumerate(budgets)
    ]


def both(backbone, decoder, budgets, adapter="policy", **settings):
    """The rows after the plain loop and after the fixed-shape one."""
    plain, static = rows(backbone, budgets, **settings), rows(backbone, budgets, **settings)
    with backbone.use_adapter(adapter):
        decode(backbone, plain)
        decoder.decode(static, adapter)
    return plain, static


def assert_equal(plain, static):
    assert [r.token_ids for r in static] == [r.token_ids for r in plain]
    assert [r.ended for r in static] == [r.ended for r in plain]
    for a, b in zip(static, plain, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_the_plain_loop(players, temperature):
    """Padding rows in the bucket, budgets that end at different steps, rows that move to smaller buckets."""
    decoder = StaticDecoder(players, capture=False)
    assert_equal(*both(players, decoder, [1, 2, 40, 17, 16, 33, 5, 5, 5], temperature=temperature))
    assert len({key.rows for key in decoder._buckets}) > 1


def test_columns_grow_when_they_run_out(players, monkeypatch):
    """A completion much longer than its prompt moves to longer buffers, in the memory taken at the start."""
    lengths, arenas = [], []
    seat = graphs._Bucket.seat
    monkeypatch.setattr(graphs._Bucket, "seat", lambda self, state: lengths.append(self.length) or seat(self, state))
    make = graphs.Arena
    monkeypatch.setattr(graphs, "Arena", lambda like, cells: arenas.append(cells) or make(like, cells))
    decoder = StaticDecoder(players, capture=False)
    assert_equal(*both(players, decoder, [300, 150, 20], temperature=0.0))
    assert lengths == [128, 256, 384]
    assert arenas == [4 * 384]


def test_adapters_and_schemas_share_the_memory(players):
    """Policy, verifier, base and constrained batches after each other, then the first again."""
    decoder = StaticDecoder(players, capture=False)
    for adapter, schema in (("policy", False), ("verifier", True), (None, False), ("policy", False), ("policy", True)):
        assert_equal(*both(players, decoder, [60, 60, 60, 60, 60], adapter=adapter, schema=schema))


def test_row_buckets():
    """4, 6, 8, 12, 16, 24, 32 ...: never more than half of the rows are padding beyond the smallest."""
    found = [graphs._row_bucket(n) for n in (1, 4, 5, 6, 7, 9, 13, 17, 25, 33, 100, 256)]
    assert found == [4, 4, 6, 6, 8, 12, 16, 24, 32, 48, 128, 256]


def test_support_is_read_off_the_cache_layers(players, tmp_path):
    """gemma3 has sliding windows: it takes the plain loop."""
    from tiny_families import build

    assert StaticDecoder.supports(players)
    assert not StaticDecoder.supports(load(build("gemma3", tmp_path)))


def test_a_failed_capture_warns_and_goes_on_without_graphs(players, caplog, monkeypatch):
    """Same tokens, slower."""
    decoder = StaticDecoder(players, capture=False)
    decoder._capture = True
    monkeypatch.setattr(graphs._Bucket, "capture", lambda self, pool: (_ for _ in ()).throw(RuntimeError("no capture")))
    assert_equal(*both(players, decoder, [20, 20, 3]))
    assert "can't be captured" in caplog.text
    assert not decoder._capture


@pytest.mark.gpu
@pytest.mark.parametrize("schema", [False, True])
def test_captured_steps_equal_the_plain_loop_on_a_gpu(engine_model_directory, schema):
    """Float32 on CUDA with real captures, also after an adapter was replaced in place."""
    from tiny_families import model_config

    from trinity_vlm.backbone import Backbone
    from trinity_vlm.config import LoraConfig

    backbone = Backbone.load(model_config(engine_model_directory, device="cuda", dtype="float32"), LoraConfig(rank=4))
    decoder = StaticDecoder(backbone, capture=True)
    assert torch.cuda.is_available()
    for seed in (1, 2):
        randomize(backbone, "policy", seed)
        assert_equal(*both(backbone, decoder, [1, 90, 60, 60, 17, 33, 60, 60, 60], schema=schema))
    assert decoder._capture
