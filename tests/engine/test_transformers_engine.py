"""The in-process engine: identity with generate, independence of neighbours, dispatching, adapters, budgets, errors."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_helpers import FREE, GREEDY, TEXTS, engine_of, request, run
from tiny_families import ask, load, picture, randomize

from trinity_vlm.engine.decoding import Row, decode
from trinity_vlm.engine.protocol import Engine, GenerationRequest, Sampling
from trinity_vlm.errors import EngineError
from trinity_vlm.types import CallType


def test_greedy_tokens_are_those_of_generate(any_players):
    """Every family, image and text prompts of different lengths in one batch, under the policy."""
    backbone = any_players
    requests = [request(t, i, sampling=GREEDY) for t in TEXTS for i in (1, 2, None)]
    completions = run(engine_of(backbone), *requests)
    for asked, (found,) in zip(requests, completions, strict=True):
        encoded = backbone.encode(asked.prompt)
        batch = backbone.collate([(encoded, ())], "left")
        with backbone.image_inputs(batch.prompts) as images, torch.no_grad():
            out = backbone.model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                **batch.token_inputs,
                **images,
                max_new_tokens=24,
                do_sample=False,
                suppress_tokens=sorted(backbone.placeholder_ids),
            )
        expected = out[0, len(encoded.input_ids) :].tolist()
        assert list(found.token_ids) == expected
        assert found.prompt_token_ids == encoded.input_ids


def test_samples_do_not_depend_on_the_batch(players):
    """Alone, among others, in small batches, twice: the same tokens and log-probabilities."""
    engine = engine_of(players)
    assert isinstance(engine, Engine)
    requests = [
        request(t, i, n=3, seed=s, want_logprobs=True) for s, (t, i) in enumerate(zip(TEXTS, (1, 2, None), strict=True))
    ]
    together = run(engine, *requests)
    alone = [run(engine, r)[0] for r in requests]
    small = run(engine_of(players, 2), *requests)
    assert run(engine, *requests) == together
    for several in (alone, small):
        for found, expected in zip(several, together, strict=True):
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            for a, b in zip(found, expected, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert len({c.token_ids for c in together[0]}) == 3


def test_sample_i_draws_from_its_own_seed(players):
    """n = 3 of one request are the first three of n = 5; another seed gives others."""
    engine = engine_of(players)
    (three,), (five,) = run(engine, request(n=3)), run(engine, request(n=5))
    assert [c.token_ids for c in three] == [c.token_ids for c in five[:3]]
    assert run(engine, request(seed=4))[0][0].token_ids != three[0].token_ids


def test_a_calls_samples_may_be_asked_for_one_by_one(players):
    """Sample i alone, and samples 2 to 4, are those of all five together."""
    engine = engine_of(players)
    (five,) = run(engine, request(n=5))
    parts = run(engine, *(request(first=i) for i in range(5)), request(n=3, first=2))
    assert [c.token_ids for part in parts for c in part] == [c.token_ids for c in (*five, *five[2:])]
    assert len({c.token_ids for c in five}) == 5


def test_reported_logprobs_are_the_trainers(players):
    """To 1e-5, for samples with temperature and filters on."""
    hot = Sampling(1.7, 0.9, 30, 24)
    ((*completions,),) = run(engine_of(players), request(n=4, sampling=hot, want_logprobs=True))
    encoded = players.encode(request().prompt)
    with torch.no_grad():
        batch = players.collate([(encoded, c.token_ids) for c in completions], "right")
        expected = players.completion_logprobs(batch, "policy")
    for row, completion in enumerate(completions):
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.logprobs == pytest.approx(expected[row, : len(completion.logprobs)].tolist(), abs=1e-5)
    assert run(engine_of(players), request())[0][0].logprobs is None


def test_adapters_beside_each_other_equal_single_runs(players):
    """Policy, verifier and base requests of one dispatch: each under its own weights."""
    engine = engine_of(players)
    requests = [
        request(adapter=a, n=2, sampling=Sampling(1.0, 1.0, 0, 24)) for a in ("policy", "verifier", None, "policy")
    ]
    mixed = run(engine, *requests)
    single = [run(engine, r)[0] for r in requests]
    assert [[c.token_ids for c in r] for r in mixed] == [[c.token_ids for c in r] for r in single]
    assert len({r[0].token_ids for r in mixed}) == 3


def test_a_loaded_adapter_acts_at_once(engine_model_directory):
    """No stale weights after a load; zero factors are the base model again."""
    backbone = load(engine_model_directory)
    backbone.add_adapter("verifier", 4, 4.0)
    engine = engine_of(backbone)
    zero = backbone.adapter_state("verifier")
    base = run(engine, request(adapter=None))[0][0].token_ids
    assert run(engine, request(adapter="verifier"))[0][0].token_ids == base
    randomize(backbone, "verifier", 2)
    changed = backbone.adapter_state("verifier")
    backbone.load_adapter_state("verifier", zero)
    engine.load_adapter("verifier", 1, changed)
    assert run(engine, request(adapter="verifier"))[0][0].token_ids != base
    engine.load_adapter("verifier", 2, zero)
    assert run(engine, request(adapter="verifier"))[0][0].token_ids == base
    with pytest.raises(EngineError, match="keys are missing"):
        engine.load_adapter("verifier", 3, {})


def test_placeholders_are_never_sampled_even_if_their_logits_are_huge(engine_model_directory):
    """The output layer is bent towards every banned id: greedy and sampled completions hold none of them."""
    backbone = load(engine_model_directory)
    base = backbone.model.get_base_model()
    head = torch.nn.Linear(64, backbone.num_logits)
    head.weight.data.copy_(base.get_output_embeddings().weight)
    head.bias.data.zero_()[sorted(backbone.placeholder_ids)] = 1e4
    base.lm_head = backbone._head = head
    engine = engine_of(backbone)
    for rule in (GREEDY, FREE, Sampling(1.0, 1.0, 0, 24)):
        for completion in run(engine, request(n=8, sampling=rule, want_logprobs=True))[0]:
            assert not set(completion.token_ids) & backbone.placeholder_ids
            assert min(completion.logprobs) > -100


def test_ends_budgets_and_texts(engine_model_directory):
    """Stop: the end id is kept in the ids and not in the text. Length: exactly the budget."""
    backbone = load(engine_model_directory)
    end = backbone.tokenizer.convert_tokens_to_ids("<|im_end|>")
    base = backbone.model.get_base_model()
    head = torch.nn.Linear(64, backbone.num_logits)
    head.weight.data.copy_(base.get_output_embeddings().weight)
    head.bias.data.zero_()[end] = 3.0
    base.lm_head = backbone._head = head
    (completions,) = run(engine_of(backbone), request(n=64, sampling=Sampling(1.0, 1.0, 0, 12)))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert stopped
    assert cut
    for completion in stopped:
        assert completion.token_ids[-1] in backbone.eos_ids
        assert completion.text == backbone.tokenizer.decode(completion.token_ids[:-1])
    assert all(len(c.token_ids) == 12 and not set(c.token_ids) & backbone.eos_ids for c in cut)
    assert "<|im_end|>" not in "".join(c.text for c in completions)


def test_the_context_limits_the_budget_and_no_room_means_an_empty_completion(players):
    """Prompts are never truncated. Context 256."""
    engine = engine_of(players)
    text = "word " * 500
    rendered = len(players.encode(ask(text, picture(1), "<think>\n")).input_ids)
    assert rendered > 256
    ((empty,),) = run(engine, request(text, want_logprobs=True))
    assert (empty.token_ids, empty.text, empty.finish_reason, empty.logprobs) == ((), "", "length", ())
    assert len(empty.prompt_token_ids) == rendered
    short = next(k for k in range(60) if len(players.encode(ask("a" * k, picture(1), "<think>\n")).input_ids) >= 40)
    room = 256 - len(players.encode(ask("a" * short, picture(1), "<think>\n")).input_ids)
    ((long,),) = run(engine, request("a" * short, sampling=Sampling(0.0, 1.0, 0, 1000)))
    assert len(long.token_ids) == room or long.finish_reason == "stop"


def test_the_thinking_tags_stay_in_the_text(players):
    """Ordinary added tokens survive decoding."""
    ids = players.tokenizer.encode("a</think>b")
    assert players.decode([*ids, min(players.eos_ids)]) == "a</think>b"


def test_bad_requests_fail_alone(players):
    """An unknown adapter or an impossible image is the error of its own request."""
    from PIL import Image

    from trinity_vlm.types import ImageRecord, Message, Prompt

    ribbon = Prompt((Message("user", "a", ImageRecord("ribbon", Image.new("RGB", (6000, 20)))),))
    bad = GenerationRequest(ribbon, "policy", FREE, 0, CallType.SOLVE, ("x",))

    async def play():
        engine = engine_of(players)
        requests = (request(adapter="critic"), bad, request())
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    unknown, impossible, fine = asyncio.run(play())
    assert isinstance(unknown, EngineError)
    assert "unknown adapter 'critic'; loaded: policy, verifier" in str(unknown)
    assert isinstance(impossible, EngineError)
    assert "can't be encoded" in str(impossible)
    assert len(fine) == 1


def test_one_prefill_for_all_samples_of_a_prompt(players, monkeypatch):
    """Requests and samples that share a prompt share its forward pass."""
    sizes = []
    forward = players.hidden_states
    monkeypatch.setattr(
        players, "hidden_states", lambda batch, cache: sizes.append(len(batch.prompts)) or forward(batch, cache)
    )
    run(engine_of(players), request(n=5), request(n=2, seed=9), request(image=2))
    assert sizes == [2]


def test_rows_that_finish_leave_the_batch(players, monkeypatch):
    """Short budgets beside a long one: later steps are narrower, results are those of single runs."""
    widths = []
    step = players.next_hidden
    monkeypatch.setattr(players, "next_hidden", lambda ids, *rest: widths.append(len(ids)) or step(ids, *rest))
    encoded = players.encode(request().prompt)
    budgets = [2, 3, 4, 5, 30, 6, 7, 8]
    rows = [Row(encoded, Sampling(0.0, 1.0, 0, b), 0, b) for b in budgets]
    with players.use_adapter("policy"):
        decode(players, rows)
        longest = Row(encoded, GREEDY, 0, 30)
        decode(players, [longest])
    assert [r.token_ids for r in rows] == [longest.token_ids[:b] for b in budgets]
    assert widths[0] == 8
    assert widths[12] == 1


def test_training_can_follow_generation(players):
    """No inference-mode tensors remain in caches: gradients flow through the same image features afterwards."""
    ((completion,),) = run(engine_of(players), request(image=7))
    batch = players.collate([(players.encode(request(image=7).prompt), completion.token_ids)], "right")
    players.completion_logprobs(batch, "policy").sum().backward()
    assert all(p.grad is not None for _, p in players.trainable_parameters())
    players.model.zero_grad()
