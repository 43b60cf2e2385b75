"""From a GenerationRequest to the body of a chat-completions call. Pure, but for a small cache of encoded images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from PIL import Image

from trinity_vlm.backbone.encoding import BoundedCache, PictureKeys
from trinity_vlm.engine.openai.structured import json_schema_format, thinking_format, verdict_format
from trinity_vlm.engine.protocol import GenerationRequest
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import Message, Prompt

# Servers in front of JSON parsers that read numbers as doubles must see the seed we sent.
_SEED_BITS = 53
_KEPT_BYTES = 256 * 2**20


class ImageUrls:
    """Pictures as data URLs, lossless, each encoded once while it stays among the last ones used."""

    def __init__(self) -> None:
        self._kept: BoundedCache[str] = BoundedCache(_KEPT_BYTES, len)
        self._keys = PictureKeys()

    def of(self, picture: Image.Image) -> str:
        """A PNG data URL of exactly these pixels."""
        return self._kept.get(self._keys.of(picture), lambda: _data_url(picture))


def _data_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat_payload(
    request: GenerationRequest,
    model: str,
    dialect: Literal["vllm", "openai"],
    images: ImageUrls,
    *,
    budget: int,
    continues: bool,
    end_ids: Sequence[int] = (),
    banned_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """The body of one call for all ``request.n`` samples; greedy ones are all alike and asked for once.

    budget: at most this many tokens
    continues: the completion goes on behind ``assistant_prefix``, sent as an opened assistant message
    end_ids, banned_ids: ids that end a completion, ids that are never sampled (vllm dialect)

    Of several samples vLLM draws the i-th from seed + i; episodes ask for one at a time. Every sampling parameter is
    sent, since vLLM otherwise takes the checkpoint's own defaults (a repetition penalty, say).
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0
    payload: dict[str, Any] = {
        "model": model,
        "messages": _messages(request.prompt, images, continues),
        "max_tokens": budget,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "n": 1 if greedy else request.n,
        "seed": derive_seed(request.seed, request.first) >> (63 - _SEED_BITS),
        **_response_format(request, dialect),
    }
    if request.want_logprobs and dialect == "vllm":
        payload |= {"logprobs": True, "top_logprobs": 0}
    if dialect == "vllm":
        payload |= _vllm_fields(0 if greedy else sampling.top_k, continues, end_ids, banned_ids)
    return payload


def with_budget(payload: Mapping[str, Any], budget: int | None) -> dict[str, Any]:
    """The same body with another budget; None leaves it to the server, which then takes all that the prompt leaves."""
    rest = {key: value for key, value in payload.items() if key != "max_tokens"}
    return rest if budget is None else {**rest, "max_tokens": budget}


def _vllm_fields(top_k: int, continues: bool, end_ids: Sequence[int], banned_ids: Sequence[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "return_token_ids": True,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }
    if end_ids:
        fields["stop_token_ids"] = list(end_ids)
    if banned_ids:
        fields["logit_bias"] = {str(i): -100.0 for i in banned_ids}
    return fields


def _response_format(request: GenerationRequest, dialect: Literal["vllm", "openai"]) -> dict[str, Any]:
    schema = request.json_schema
    if schema is None:
        return {}
    if dialect == "openai":
        return {"response_format": json_schema_format(schema)}
    after = request.schema_after
    return {"response_format": verdict_format(schema) if after is None else thinking_format(schema, after)}


def _messages(prompt: Prompt, images: ImageUrls, continues: bool) -> list[dict[str, Any]]:
    messages = [_message(message, images) for message in prompt.messages]
    if continues and prompt.assistant_prefix:
        messages.append({"role": "assistant", "content": prompt.assistant_prefix})
    return messages


def _message(message: Message, images: ImageUrls) -> dict[str, Any]:
    if message.image is None:
        return {"role": message.role, "content": message.text}
    picture = {"type": "image_url", "image_url": {"url": images.of(message.image.pixels)}}
    return {"role": message.role, "content": [picture, {"type": "text", "text": message.text}]}
