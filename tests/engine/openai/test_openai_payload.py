"""What is sent and how answers are read: sampling, seeds, prefixes, images, schemas, token ids."""

import base64
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from trinity_vlm.config import RolesConfig
from trinity_vlm.engine.openai.answers import UNKNOWN_ID, read_completions
from trinity_vlm.engine.openai.client import ServerFailure
from trinity_vlm.engine.openai.payload import ImageUrls, chat_payload
from trinity_vlm.engine.openai.structured import json_schema_format, thinking_format, verdict_format
from trinity_vlm.engine.protocol import Sampling
from trinity_vlm.roles import PromptSet, Verifier
from trinity_vlm.roles.verifier import verdict_schemas
from trinity_vlm.types import CallType, Completion, ImageRecord, Message, Prompt

SCHEMAS = verdict_schemas(40)


def payload(request, dialect="vllm", continues=False, **changes):
    return chat_payload(request, "base", dialect, ImageUrls(), budget=50, continues=continues, **changes)


def picture(seed, size=(32, 48)):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_every_sampling_parameter_is_sent(ask):
    """What is left out, vLLM takes from the checkpoint's generation_config: a repetition penalty would go unseen."""
    body = payload(ask(n=4, sampling=Sampling(0.7, 0.8, 20, 99)), end_ids=[3, 5], banned_ids=[7])
    expected = {
        "model": "base",
        "max_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 4,
        "stop_token_ids": [3, 5],
        "logit_bias": {"7": -100.0},
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    assert expected.items() <= body.items()


def test_the_standard_dialect_sends_standard_fields_only(ask):
    """Strict servers refuse unknown fields."""
    body = payload(ask(json_schema=SCHEMAS[CallType.SCREEN], want_logprobs=True), "openai", end_ids=[3], banned_ids=[7])
    standard = {"model", "messages", "max_tokens", "temperature", "top_p", "n", "seed", "response_format"}
    assert set(body) == standard


def test_greedy_calls_ask_for_one_sample(ask):
    """vLLM refuses n > 1 at temperature 0, and filters mean nothing there."""
    body = payload(ask(n=4, sampling=Sampling(0.0, 0.9, 20, 5)))
    assert (body["n"], body["top_p"], body["top_k"]) == (1, 1.0, 0)


def test_seeds_differ_by_request_and_survive_a_double(ask):
    seeds = [payload(ask(seed=seed))["seed"] for seed in (*range(500), 2**63 - 1)]
    assert len(set(seeds)) == 501
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)
    assert payload(ask(seed=4))["seed"] == seeds[4]


def test_samples_asked_for_one_by_one_draw_differently(ask):
    seeds = [payload(ask(seed=4, first=first))["seed"] for first in range(100)]
    assert len(set(seeds)) == 100


def test_the_thinking_prefix_opens_the_assistant_turn(ask):
    request = ask()
    request = replace(request, prompt=replace(request.prompt, assistant_prefix="<think>\n"))
    continued, omitted = payload(request, continues=True), payload(request)
    assert continued["messages"][-1] == {"role": "assistant", "content": "<think>\n"}
    assert (continued["continue_final_message"], continued["add_generation_prompt"]) == (True, False)
    assert omitted["messages"][-1]["role"] == "user"
    assert (omitted["continue_final_message"], omitted["add_generation_prompt"]) == (False, True)


def test_pictures_travel_without_loss_and_before_the_text(ask):
    image = ImageRecord("a", picture(1))
    body = payload(ask(prompt=Prompt((Message("user", "what?", image),))))
    first, second = body["messages"][0]["content"]
    head, data = first["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == image.pixels.tobytes()
    assert second == {"type": "text", "text": "what?"}


def test_a_picture_is_encoded_once_and_told_from_others(monkeypatch):
    """By its pixels, not by its object."""
    urls = ImageUrls()
    first, second = urls.of(picture(1)), urls.of(picture(2))
    monkeypatch.setattr(Image.Image, "save", None)
    assert urls.of(picture(1)) == first != second


def text_of(pieces, choices):
    """One completion that a sequence of pieces allows; ``choices``: what to write where something is free."""
    free = iter(choices)
    return "".join(piece["value"] if piece["type"] == "const_string" else next(free) for piece in pieces)


def test_a_verdict_is_spelled_out_key_by_key():
    """Pieces in the schema's order and json.dumps's layout; the parser reads what they allow."""
    pieces = verdict_format(SCHEMAS[CallType.SCREEN])["format"]["elements"]
    assert [p["type"] for p in pieces] == ["const_string", "json_schema"] + ["const_string", "regex"] * 3 + [
        "const_string"
    ]
    assert pieces[1]["json_schema"] == {"type": "string", "maxLength": 40}
    text = text_of(pieces, ['"seen"', "1", "0", "0.7"])
    assert text == json.dumps({"justification": "seen", "fact_q": 1, "corr_a": 0, "difficulty": 0.7})
    verdict = Verifier(PromptSet.load("short"), RolesConfig(prompts="short")).parse_screening(
        Completion((), (), text, "stop")
    )
    assert (verdict.parsed, verdict.fact_q, verdict.corr_a, verdict.difficulty) == (True, 1, 0, 0.7)


def test_every_spelling_of_an_enumerated_number_is_allowed():
    """A model about to write 0.0 must not be led from "0." to 0.25."""
    (*_, number, _) = verdict_format(SCHEMAS[CallType.REASON])["format"]["elements"]
    words = ["0.0", "0", "0.25", "0.5", "1.0", "1"]
    assert all(re.fullmatch(number["pattern"], word) for word in words)
    assert not any(re.fullmatch(number["pattern"], word) for word in ("0.", "0.2", "0x5", "10", ""))


def test_thinking_is_free_up_to_the_closing_tag():
    pieces = thinking_format(SCHEMAS[CallType.DISPUTE], "</think>")["format"]["elements"]
    assert pieces[0] == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    assert pieces[2:] == verdict_format(SCHEMAS[CallType.DISPUTE])["format"]["elements"]


def test_an_open_schema_is_left_to_the_server():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert verdict_format(schema)["format"]["elements"] == [{"type": "json_schema", "json_schema": schema}]


def test_the_standard_schema_quotes_numbers_with_fractions_only():
    schema = json_schema_format(SCHEMAS[CallType.SCREEN])["json_schema"]["schema"]
    assert schema["properties"]["difficulty"] == {"type": "string", "enum": ["0.1", "0.4", "0.7", "1.0", "1"]}
    assert schema["properties"]["fact_q"] == {"type": "integer", "enum": [0, 1]}
    assert schema["required"] == SCHEMAS[CallType.SCREEN]["required"]


def choice(index=0, text="hi", reason="stop", **more):
    return {"index": index, "message": {"content": text}, "finish_reason": reason, **more}


def test_choices_are_put_in_sample_order():
    answer = {
        "prompt_token_ids": [1, 2],
        "choices": [choice(1, "b", token_ids=[4]), choice(0, "a", "length", token_ids=[3])],
    }
    first, second = read_completions(answer, 2, want_logprobs=False)
    assert (first.text, first.token_ids, first.finish_reason) == ("a", (3,), "length")
    assert (second.text, second.token_ids, second.finish_reason) == ("b", (4,), "stop")
    assert first.prompt_token_ids == second.prompt_token_ids == (1, 2)


def test_tokens_that_are_only_counted_keep_their_number():
    """Token metrics stay right; as ids they can't be taken for real ones."""
    answer = {"choices": [choice()], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    (completion,) = read_completions(answer, 1, want_logprobs=True)
    assert completion.prompt_token_ids == (UNKNOWN_ID,) * 3
    assert completion.token_ids == (UNKNOWN_ID,) * 2
    assert completion.logprobs is None


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_thinking_block_cut_off_by_the_server_is_put_back(field):
    """A server with a reasoning parser hands it out apart; parsers here read one text."""
    thinking = {"index": 0, "finish_reason": "stop", "message": {"content": '{"a": 1}', field: "so"}}
    assert read_completions({"choices": [thinking]}, 1, False)[0].text == 'so</think>{"a": 1}'
    thinking["message"]["content"] = None
    assert read_completions({"choices": [thinking]}, 1, False)[0].text == "so"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [choice(), choice(1)]},
        {"choices": [choice(reason="abort")]},
        {"choices": [choice(reason=None)]},
        {"choices": ["text"]},
        {"choices": [{"index": 0, "finish_reason": "stop"}]},
        {"choices": [choice(token_ids=[1, 2], logprobs={"content": [{"logprob": -1.0}]})]},
    ],
)
def test_anything_else_is_the_servers_fault(answer):
    """So that the request goes to another server."""
    with pytest.raises(ServerFailure):
        read_completions(answer, 1, want_logprobs=True)
