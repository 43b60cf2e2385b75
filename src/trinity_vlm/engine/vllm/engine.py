"""The in-process vLLM engine: continuous batching, several adapters side by side, prefix and image caches.

    episode coroutines --generate--> one vLLM request per sample, on the engine's own event loop --> Completions

vLLM's scheduler batches whatever is there, so episodes hold nothing. Guaranteed: a sample's noise depends on its seed
and position alone. Not guaranteed: its logits, whose last bits vary with the batch and with the prefix cache, so that
a near tie may fall either way in another run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import ModelConfig
from trinity_vlm.engine.background import BackgroundLoop
from trinity_vlm.engine.parity import completion_gap
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.vllm.adapters import AdapterFolder, delta_size
from trinity_vlm.engine.vllm.library import engine_arguments, import_vllm, only_device, served_rank
from trinity_vlm.engine.vllm.requests import (
    Job,
    check_expansion,
    cut_behind,
    lark_grammar,
    make_completion,
    make_job,
    sampling_arguments,
)
from trinity_vlm.engine.vllm.versions import AdapterVersions
from trinity_vlm.engine_settings import VllmConfig
from trinity_vlm.errors import ConfigError, EngineError
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import CallType, Completion, Message, Prompt

_CANARY = Prompt((Message("user", "Count from one to ten, then say what comes after."),))
_CANARY_SAMPLING = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=8)
# Deltas (root mean square) from which on an adapter must move the canary's log-probabilities: any in float32;
# in bfloat16 smaller ones may drown in rounding.
_VISIBLE_DELTA = {torch.float32: 1e-12, torch.bfloat16: 1e-5}


class VllmEngine:
    """Engine over a vLLM of the backbone's model; the backbone itself only encodes prompts and decodes completions.

    max_sequences: sequences decoded side by side

    Every adapter of the backbone is served as it is now, under version 0. Raises ConfigError when vLLM is missing,
    ``lora=None``, or an adapter's rank is too large; EngineError when vLLM doesn't start.
    """

    def __init__(self, backbone: Backbone, model: ModelConfig, settings: VllmConfig, max_sequences: int) -> None:
        self.backbone = backbone
        if not backbone.adapter_names:
            raise ConfigError("engine.kind=vllm serves adapters over fixed base weights; full-parameter mode has none")
        states = {name: backbone.adapter_state(name) for name in backbone.adapter_names}
        self._shapes = {name: {key: value.shape for key, value in state.items()} for name, state in states.items()}
        self._library = import_vllm()
        ranks = {
            name: max(s[0] for key, s in shapes.items() if ".lora_A." in key) for name, shapes in self._shapes.items()
        }
        rank = served_rank(ranks, self._library.lora_ranks)
        arguments = engine_arguments(backbone, model, settings, max_sequences, rank)
        self._names = itertools.count()
        self._folder = AdapterFolder()
        self._background = BackgroundLoop("vllm-engine")
        try:
            self._llm = self._background.call(self._start(arguments))
        except Exception as error:
            self._background.close()
            self._folder.close()
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        self._versions = AdapterVersions(self._llm, self._library.LoRARequest)
        self._closing = weakref.finalize(self, _close, self._llm, self._background, self._folder)
        for name, state in states.items():
            self.load_adapter(name, 0, state)

    def episode(self) -> AbstractContextManager[None]:
        """Nothing to hold: vLLM takes up requests as they come."""
        return nullcontext()

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """``request.n`` completions in sample order; see the protocol.

        A cancelled caller aborts its samples. Raises EngineError for an unknown adapter, an image or schema that can't
        be used, log-probabilities under a schema, a prompt that vLLM reads differently, and a vLLM that failed.
        """
        self._check_open()
        job = make_job(self.backbone, request)
        if job.budget <= 0:
            logprobs = () if request.want_logprobs else None
            return [Completion(job.encoded.input_ids, (), "", "length", logprobs)] * request.n
        return await self._background.run(self._complete(job))

    def load_adapter(self, name: str, version: int, state: Mapping[str, Tensor]) -> None:
        """Serve ``state`` as adapter ``name`` from the next request on; those under way finish with what they began.

        Raises EngineError for wrong keys, and when vLLM refuses the adapter or a canary prompt shows no effect of it;
        the version before it then stays.
        """
        self._check_open()
        self._check_keys(name, state)
        settings: Any = self.backbone.model.peft_config
        alpha, dtype = float(settings[name].lora_alpha), self.backbone.dtype
        folder = self._folder.write(f"{name}-v{version}", state, alpha, dtype)
        must_act = delta_size(state, alpha) >= _VISIBLE_DELTA[dtype]
        canary = make_job(self.backbone, _canary_request())

        async def check(handle: Any) -> None:
            if must_act and not await self._acts(canary, handle):
                raise EngineError(
                    f"adapter {name!r} version {version} changes nothing: a canary prompt has the same "
                    "log-probabilities with and without it, though its weights are not zero; do its keys name this "
                    "model's layers?"
                )

        self._background.call(self._versions.replace(name, version, folder, check))

    def close(self) -> None:
        """Stop vLLM and delete its adapters; happens by itself when the engine is dropped or the process ends."""
        self._closing()

    # On the engine's own event loop

    async def _start(self, arguments: dict[str, Any]) -> Any:
        with only_device(self.backbone.device):
            llm = self._library.AsyncLLM.from_engine_args(self._library.AsyncEngineArgs(**arguments))
        try:
            await llm.collective_rpc("trinity_end_with", args=(str(self._folder.lock), os.getpid()))
            hooked = await llm.collective_rpc("trinity_ban", args=(sorted(self.backbone.placeholder_ids),))
            if not all(hooked):
                raise EngineError("this vLLM makes its logits where placeholder tokens can't be kept out of them")
        except BaseException:
            llm.shutdown()
            raise
        return llm

    async def _complete(self, job: Job) -> list[Completion]:
        async with self._versions.use(job.request.adapter) as handle:
            try:
                async with asyncio.TaskGroup() as group:
                    samples = [group.create_task(self._sample(job, i, handle)) for i in range(job.request.n)]
            except ExceptionGroup as failures:
                error = failures.exceptions[0]
                if isinstance(error, EngineError):
                    raise error from error.__cause__
                raise EngineError(f"generation failed: {type(error).__name__}: {error}") from error
        return [sample.result() for sample in samples]

    async def _sample(self, job: Job, index: int, handle: Any) -> Completion:
        request, seed = job.request, derive_seed(job.request.seed, index)
        if request.json_schema is None:
            token_ids, logprobs = await self._run(job, handle, seed)
            return make_completion(self.backbone, job, token_ids, logprobs)
        free: list[int] = []
        if request.schema_after is not None:
            free, _ = await self._run(job, handle, seed, stop=request.schema_after)
            text = self.backbone.tokenizer.decode(free, skip_special_tokens=False)
            if request.schema_after not in text or free[-1] in self.backbone.eos_ids:
                return make_completion(self.backbone, job, free, None)
            free = cut_behind(self.backbone, free, request.schema_after)
        constrained: list[int] = []
        if len(free) < job.budget:
            constrained, _ = await self._run(job, handle, derive_seed(seed, "schema"), free, schema=request.json_schema)
        return make_completion(self.backbone, job, [*free, *constrained], None)

    async def _run(
        self,
        job: Job,
        handle: Any,
        seed: int,
        continuation: Sequence[int] = (),
        stop: str | None = None,
        schema: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> tuple[list[int], list[float] | None]:
        """One vLLM request behind prompt and ``continuation``: its token ids, and log-probabilities when wanted."""
        request, library = job.request, self._library
        ends = sorted(self.backbone.eos_ids)
        budget = job.budget - len(continuation)
        arguments = sampling_arguments(request.sampling, budget, seed, ends, request.want_logprobs)
        if stop is not None:
            arguments |= {"stop": [stop], "include_stop_str_in_output": True, "detokenize": True}
            arguments |= {"skip_special_tokens": False}
        if schema is not None:
            arguments["structured_outputs"] = library.StructuredOutputsParams(grammar=lark_grammar(schema))
        parameters = library.SamplingParams(output_kind=library.RequestOutputKind.FINAL_ONLY, **arguments)
        prompt = job.vllm_prompt(continuation, salt)
        final: Any = None
        async for output in self._llm.generate(prompt, parameters, f"{next(self._names)}", lora_request=handle):
            final = output
        (sample,) = final.outputs
        if sample.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a {request.call} call with {sample.finish_reason!r}")
        check_expansion((*job.encoded.input_ids, *continuation), final.prompt_token_ids, job)
        token_ids = list(sample.token_ids)
        if not request.want_logprobs:
            return token_ids, None
        return token_ids, [at[i].logprob for i, at in zip(token_ids, sample.logprobs, strict=True)]

    async def _acts(self, canary: Job, handle: Any) -> bool:
        """Whether greedy completions with and without the adapter differ in a token or a log-probability.

        Both run alone, one after the other, on an empty prefix cache: equal weights would give equal bits.
        """
        completions = []
        for adapter in (None, handle):
            token_ids, logprobs = await self._run(canary, adapter, 0, salt=f"canary-{next(self._names)}")
            completions.append(make_completion(self.backbone, canary, token_ids, logprobs))
        return completion_gap(*completions) > 0

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise EngineError("this engine was closed")

    def _check_keys(self, name: str, state: Mapping[str, Tensor]) -> None:
        if name not in self._shapes:
            raise EngineError(f"unknown adapter {name!r}; the backbone has {', '.join(self._shapes)}")
        expected = self._shapes[name]
        wrong = sorted(k for k in expected.keys() | state.keys() if k not in state or state[k].shape != expected.get(k))
        if wrong:
            raise EngineError(
                f"state of adapter {name!r}: {len(wrong)} of {len(expected)} keys are missing, foreign or misshapen, "
                f"for example {wrong[0]}"
            )


def _canary_request() -> GenerationRequest:
    return GenerationRequest(_CANARY, None, _CANARY_SAMPLING, 0, CallType.SOLVE, ("canary",), want_logprobs=True)


def _close(llm: Any, background: BackgroundLoop, folder: AdapterFolder) -> None:
    llm.shutdown()
    llm.shutdown = lambda: None  # its __del__ would call it again, at a moment when the interpreter has nothing left
    background.close()
    folder.close()
