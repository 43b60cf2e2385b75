"""The in-process vLLM engine: continuous batching, several adapters side by side, prefix and image caches.

    episode coroutines --generate--> one vLLM request per sample, on the engine's own event loop --> Completions

vLLM's scheduler batches whatever is there, so episodes hold nothing. Guaranteed: a sample's noise depends on its seed
and position alone. Not guaranteed: its logits, whose last bits vary with the batch and with the prefix cache, so that
a near tie may fall either way in another run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import ModelConfig
from trinity_vlm.ema import LowRank
from trinity_vlm.engine.background import BackgroundLoop
from trinity_vlm.engine.parity import completion_gap
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.vllm.adapters import AdapterFolder, delta_size, deltas
from trinity_vlm.engine.vllm.closing import Resources, close_from_any_thread
from trinity_vlm.engine.vllm.library import engine_arguments, import_vllm, kernel_options, only_device, served_adapters
from trinity_vlm.engine.vllm.requests import (
    Job,
    check_expansion,
    cut_behind,
    lark_grammar,
    make_completion,
    make_job,
    sampling_arguments,
)
from trinity_vlm.engine.vllm.sharing import SharedWeights, SharingReport, import_tensors
from trinity_vlm.engine.vllm.swapping import WeightWriter
from trinity_vlm.engine.vllm.versions import AdapterVersions
from trinity_vlm.engine_settings import VllmConfig
from trinity_vlm.errors import ConfigError, EngineError
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import CallType, Completion, Message, Prompt

_log = logging.getLogger(__name__)
_CACHE_RESETS = 20
_CANARY = Prompt((Message("user", "Count from one to ten, then say what comes after."),))
_CANARY_SAMPLING = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=8)
# Deltas (root mean square) from which on an adapter must move the canary's log-probabilities: any in float32;
# in bfloat16 smaller ones may drown in rounding.
_VISIBLE_DELTA = {torch.float32: 1e-12, torch.bfloat16: 1e-5}


class VllmEngine:
    """Engine over a vLLM of the backbone's model; the backbone itself only encodes prompts and decodes completions.

    max_sequences: sequences decoded side by side
    adapters: False for an engine that serves none, so that its weights have to be swapped (``swap_weights``)
    overrides: further keyword arguments of vLLM's AsyncEngineArgs, for benchmarks

    Every adapter of the backbone is served as it is now, under version 0. On a GPU, with ``share_weights`` set, the
    backbone's frozen weights become views of vLLM's; its memory peaks before that, when vLLM has loaded its weights
    and taken its key-value cache beside the backbone's own copy. Captured graphs and compiled code of the backbone
    must come later than this. Raises ConfigError for ``lora=None`` and an adapter whose rank is too large;
    EngineError when vLLM is missing or doesn't start.
    """

    def __init__(
        self,
        backbone: Backbone,
        model: ModelConfig,
        settings: VllmConfig,
        max_sequences: int,
        *,
        adapters: bool = True,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.backbone = backbone
        if not backbone.adapter_names:
            raise ConfigError("engine.kind=vllm serves adapters over fixed base weights; full-parameter mode has none")
        states = {name: backbone.adapter_state(name) for name in backbone.adapter_names}
        self._shapes = {name: {key: value.shape for key, value in state.items()} for name, state in states.items()}
        self._library = import_vllm()
        served = served_adapters(self._shapes, self._library.lora_ranks) if adapters else None
        arguments = engine_arguments(backbone, model, settings, max_sequences, served) | dict(overrides or {})
        self._names = itertools.count()
        self._counts = Counter({"prompt_tokens": 0, "cached_prompt_tokens": 0, "adapter_loads": 0})
        self._writer: WeightWriter | None = None
        self._swappable = {} if adapters else states
        self._folder = AdapterFolder()
        self._background = BackgroundLoop("vllm-engine")
        try:
            self._llm = self._background.call(self._start(arguments))
        except Exception as error:
            self._background.close()
            self._folder.close()
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        self._versions = AdapterVersions(self._llm, self._library.LoRARequest)
        self._resources = Resources(self._llm, self._background, self._folder)
        self._closing = weakref.finalize(self, close_from_any_thread, self._resources)
        if not adapters:
            opening = WeightWriter.open(self._llm.collective_rpc, backbone.model, self._folder.path)
            self._writer = self._background.call(opening)
            return
        for name, state in states.items():
            self.load_adapter(name, 0, state)
        if settings.share_weights and backbone.device.type == "cuda":
            self._share_if_possible()

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: ``prompt_tokens``, how many of them came from the prefix cache, ``adapter_loads``."""
        return dict(self._counts)

    @property
    def sharing(self) -> SharingReport | None:
        """What of the backbone's weights is vLLM's; None when nothing was asked to be shared."""
        shared = self._resources.shared
        return None if shared is None else shared.report

    def share_weights(self) -> SharingReport:
        """Make the backbone's frozen weights views of vLLM's where both are equal bit for bit; the constructor does.

        ``close`` gives the backbone copies of its own again.
        """
        self._check_open()
        (handles,) = self._background.call(self._llm.collective_rpc("trinity_export"))
        weights = import_tensors(handles, self.backbone.device)
        self._resources.shared = SharedWeights(self.backbone.model, weights)
        report = self._resources.shared.report
        _log.info("%s", report)
        return report

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
        the version before it then stays. An engine that serves no adapters keeps it for ``swap_weights``.
        """
        self._check_open()
        self._check_keys(name, state)
        if self._writer is not None:
            self._swappable[name] = {key: value.detach().to("cpu", copy=True) for key, value in state.items()}
            return
        alpha, dtype = self._alpha(name), self.backbone.dtype
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
        self._counts["adapter_loads"] += 1

    def swap_weights(self, name: str) -> float:
        """Make vLLM's own weights those of the base plus adapter ``name`` as it was loaded last; returns seconds.

        All weights of the language model are written, as without adapters they would have to be. Only for an engine
        with ``adapters=False`` and no request in flight; raises EngineError otherwise.
        """
        self._check_open()
        if self._writer is None:
            raise EngineError("swap_weights is for an engine built with adapters=False; this one serves adapters")
        if name not in self._swappable:
            raise EngineError(f"unknown adapter {name!r}; the backbone has {', '.join(self._swappable)}")
        if self._llm.output_processor.has_unfinished_requests():
            raise EngineError("swap_weights: requests are in flight, which would go on with other weights")
        start = time.perf_counter()
        self._background.call(self._swap(self._writer, deltas(self._swappable[name], self._alpha(name))))
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop vLLM and delete its adapters; happens by itself when the engine is dropped or the process ends."""
        self._closing()

    # On the engine's own event loop

    async def _start(self, arguments: dict[str, Any]) -> Any:
        for variable, value in kernel_options(self.backbone.device).items():
            os.environ.setdefault(variable, value)
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

    async def _swap(self, writer: WeightWriter, added: Mapping[str, LowRank]) -> None:
        await writer.write(added)
        for _ in range(_CACHE_RESETS):  # blocks of the last requests are let go a moment after their answers
            if await self._llm.reset_prefix_cache():
                return
            await asyncio.sleep(0.05)
        raise EngineError("vLLM's prefix cache could not be reset: keys and values of other weights would be reused")

    async def _complete(self, job: Job) -> list[Completion]:
        if self._writer is not None and job.request.adapter is not None:
            raise EngineError(
                f"this engine serves no adapters: swap_weights({job.request.adapter!r}) and ask for adapter=None"
            )
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
        request = job.request
        seed = derive_seed(request.seed, request.first + index)
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
        self._counts["prompt_tokens"] += len(final.prompt_token_ids)
        self._counts["cached_prompt_tokens"] += final.num_cached_tokens or 0
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

    def _share_if_possible(self) -> None:
        try:
            self.share_weights()
        except Exception as error:  # no CUDA IPC in this container, for example: two copies work as well
            _log.warning("the base weights stay on the GPU twice: %s: %s", type(error).__name__, error)

    def _alpha(self, name: str) -> float:
        settings: Any = self.backbone.model.peft_config
        return float(settings[name].lora_alpha)

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
