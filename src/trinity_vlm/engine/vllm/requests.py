"""From a GenerationRequest to what vLLM takes, and from what it returns to Completions.

Prompts go in as token ids, the image's mark not yet expanded, beside the image itself; vLLM expands the mark. What it
made of them comes back and must equal the trainer's own encoding id for id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_vlm.backbone import Backbone, EncodedPrompt
from trinity_vlm.engine.constrained import grammar
from trinity_vlm.engine.expansion import difference
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.errors import EngineError
from trinity_vlm.types import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request ready for vLLM. ``unexpanded`` ids hold one mark per image; ``budget`` tokens may be generated."""

    request: GenerationRequest
    encoded: EncodedPrompt
    unexpanded: tuple[int, ...]
    budget: int

    def vllm_prompt(self, continuation: Sequence[int] = (), salt: str | None = None) -> dict[str, Any]:
        """vLLM's input: prompt and ``continuation`` as ids; a ``salt`` keeps it apart in the prefix cache."""
        prompt: dict[str, Any] = {"prompt_token_ids": [*self.unexpanded, *continuation]}
        image = self.request.prompt.image
        if image is not None:
            prompt["multi_modal_data"] = {"image": image.pixels}
            prompt["multi_modal_uuids"] = {"image": self.encoded.image_key}
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt


def make_job(backbone: Backbone, request: GenerationRequest) -> Job:
    """Encode the prompt and work out the budget; raises EngineError for what this engine can't do."""
    if request.json_schema is not None and request.want_logprobs:
        raise EngineError(
            f"log-probabilities of a {request.call} call under a JSON schema: vLLM normalises them over the tokens "
            "that the schema allows, which is not the model's distribution; ask for one or the other"
        )
    try:
        encoded = backbone.encode(request.prompt)
    except ValueError as error:
        raise EngineError(f"the prompt of a {request.call} call can't be encoded: {error}") from error
    budget = min(request.sampling.max_tokens, backbone.context - len(encoded.input_ids))
    return Job(request, encoded, backbone.text_ids(request.prompt), budget)


def sampling_arguments(
    sampling: Sampling, max_tokens: int, seed: int, ends: Sequence[int], want_logprobs: bool
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams, for one sample."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop_token_ids": list(ends),
        "logprobs": 0 if want_logprobs else None,  # 0: the sampled token's alone
        "detokenize": False,
    }


def lark_grammar(schema: Mapping[str, Any]) -> str:
    """The very grammar that the ``transformers`` engine enforces, in the one form that vLLM passes on unchanged."""
    text = grammar(schema)
    if not text.startswith("{"):
        return text
    (only,) = json.loads(text)["grammars"]
    return f"start: %json {json.dumps(only['json_schema'])}"


def check_expansion(expected: Sequence[int], found: Sequence[int], job: Job) -> None:
    """Raise EngineError, naming the first difference, when vLLM read a prompt differently than the trainer will."""
    differs = difference(found, expected)
    if differs is None:
        return
    image = job.request.prompt.image
    size = "" if image is None else f" (image {image.uid}, {image.pixels.size[0]}x{image.pixels.size[1]} pixels)"
    raise EngineError(
        f"vLLM read the prompt of a {job.request.call} call as other tokens than the trainer: {differs}{size}. The "
        "image is expanded differently: check that model.min_pixels and max_pixels reach vLLM's processor and that "
        "both use one version of transformers"
    )


def make_completion(
    backbone: Backbone, job: Job, token_ids: Sequence[int], logprobs: Sequence[float] | None
) -> Completion:
    """A sample as the other engines return it; raises EngineError when an id was drawn that never may be."""
    if forbidden := backbone.placeholder_ids.intersection(token_ids):
        raise EngineError(f"vLLM sampled the placeholder ids {sorted(forbidden)}, which were banned in its worker")
    return Completion(
        prompt_token_ids=job.encoded.input_ids,
        token_ids=tuple(token_ids),
        text=backbone.decode(token_ids),
        finish_reason="stop" if token_ids and token_ids[-1] in backbone.eos_ids else "length",
        logprobs=None if logprobs is None else tuple(logprobs),
    )


def cut_behind(backbone: Backbone, token_ids: Sequence[int], marker: str) -> list[int]:
    """The ids up to the marker. A last token that reaches beyond it is replaced by those of its part up to the marker:
    what it began to write is left to the schema."""
    ids = list(token_ids)
    before = backbone.tokenizer.decode(ids[:-1], skip_special_tokens=False)
    text = backbone.tokenizer.decode(ids, skip_special_tokens=False)
    end = text.index(marker) + len(marker)
    if not text[end:].strip():
        return ids
    return ids[:-1] + backbone.tokenizer(text[len(before) : end], add_special_tokens=False)["input_ids"]
