"""What a run needs of one GPU's memory, before anything is loaded: numbers in, a plan out.

    model's shape + configuration ──▶ named parts in GiB ──▶ total against the card ──▶ verdict and advice

Everything counts as if it were there at once: generation and update overlap, and neither gives memory back. Sizes of
tensors are exact; activations, contexts and graphs are estimates, and the notes of their parts say so. The plan is one
worker's: with several, each has a GPU and its share of the step's images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from trinity_vlm.activations import COMPILED, COMPILED_FLOAT32_ADAPTERS, EAGER, ActivationModel
from trinity_vlm.config import Config
from trinity_vlm.engine_settings import (
    ENGINES_WITH_THEIR_OWN_MODEL,
    VLLM_CPU_CACHE_GIB,
    vllm_adapter_slots,
    vllm_batch_tokens,
)
from trinity_vlm.memory_demand import GIB, CacheNeed, Demand
from trinity_vlm.model_shapes import ModelShape
from trinity_vlm.section import Section

SectionType = TypeVar("SectionType", bound=Section)

USABLE = 0.95
"""Share of the memory that a plan may fill; the rest goes to fragmentation and to what was estimated too low."""

CONTEXT_GIB, GRAPHS_GIB = 0.75, 1.0
"""Assumed: a process on a GPU with its libraries' workspaces, and captured decode steps."""
NCCL_GIB = 1.25
"""Assumed, of several workers: 32 channels to 4 neighbours (one of a ring, three of a tree) with 10 MiB each. Of these
NCCL documents 4 MiB (NCCL_BUFFSIZE's default); the rest are its other protocols' buffers. It connects only the
algorithms that it uses, so mostly it takes less; with NVLink's multicast it may take more."""
FEATURE_CACHE_GIB = 2.0
LOGIT_CHUNK_GIB = {True: 1.0, False: 0.125}
"""On a GPU, and on a CPU."""
LOGIT_TENSORS = 3
"""Held at once of a chunk, in sizes of its float32 logits."""
NUM_ADAPTERS = 2
"""Policy and Verifier."""
SAMPLING_BYTES = 16
"""Per sequence and word of the vocabulary: float32 logits, sorted copies and their indices."""
_ROUNDING_GIB = 1e-6
ARENA_SHARE = 0.4
"""Of what the weights leave, the most that the ``transformers`` engine's cache takes on a GPU."""


class Verdict(StrEnum):
    """TIGHT: it runs, but the cache holds less than a typical step's requests, so some wait for others."""

    FITS = "fits"
    TIGHT = "tight"
    TOO_LARGE = "too_large"


_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a plan, for example ``Part("base weights", 16.33, "8.77 G parameters, bfloat16, once")``."""

    name: str
    gib: float
    note: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What goes where.

    missing_cache_gib: of vLLM's cache to one sequence of ``model.context``, without which vLLM does not start
    advice: alternatives, each a text of overrides ``key=value`` that makes it fit
    """

    parts: tuple[Part, ...]
    cache: CacheNeed
    memory_gib: float
    verdict: Verdict
    missing_cache_gib: float = 0.0
    advice: tuple[str, ...] = ()

    @property
    def total_gib(self) -> float:
        return sum(part.gib for part in self.parts)

    @property
    def budget_gib(self) -> float:
        """What may be filled."""
        return USABLE * self.memory_gib

    @property
    def excess_gib(self) -> float:
        """Of all parts over what may be filled."""
        excess = self.total_gib - self.budget_gib
        return excess if excess > _ROUNDING_GIB else 0.0


def plan_memory(
    config: Config, shape: ModelShape, memory_gib: float, *, on_gpu: bool = True, workers: int = 1
) -> MemoryPlan:
    """The plan of one of ``workers`` processes on a device of ``memory_gib``; with advice unless everything fits."""
    demand = Demand(config, shape, on_gpu, workers)
    plan = _weigh(demand, memory_gib)
    return plan if plan.verdict is Verdict.FITS else replace(plan, advice=tuple(_advise(demand, plan)))


def planned_kv_gib(config: Config, shape: ModelShape, memory_gib: float, *, workers: int = 1) -> float:
    """Key-value cache for vLLM where ``engine.vllm.kv_cache_gib`` is unset: what everything else leaves of the card.

    At most what a typical step holds (beyond that the update has more use for it: activations that are kept need not be
    made again), at least one sequence of ``model.context``, without which vLLM does not start.
    """
    return _planned_kv(Demand(config, shape, workers=workers), memory_gib)


def small_cache(config: Config, plan: MemoryPlan) -> str:
    """In words: vLLM's cache does not hold one sequence. To be asked of a plan with ``missing_cache_gib``."""
    size, least = config.engine.vllm.kv_cache_gib, _rounded_up(plan.cache.one_sequence)
    given = f"={size:g}" if size is not None else f" is unset, {VLLM_CPU_CACHE_GIB:g} GiB on a CPU: that"
    return (
        f"engine.vllm.kv_cache_gib{given} does not hold one sequence of model.context={config.model.context}, which "
        f"vLLM insists on: it takes {least:.2f} GiB. Raise the one or lower the other"
    )


def _planned_kv(demand: Demand, memory_gib: float) -> float:
    need = demand.cache_need()
    left = USABLE * memory_gib - sum(part.gib for part in _fixed_parts(demand))
    return max(need.one_sequence, min(left, need.typical))


def _weigh(demand: Demand, memory_gib: float) -> MemoryPlan:
    """A plan without advice."""
    cache, need = _cache_part(demand, memory_gib), demand.cache_need()
    held = sum(part.gib for part in cache)
    plan = MemoryPlan(
        parts=(*_fixed_parts(demand), *cache),
        cache=need,
        memory_gib=memory_gib,
        verdict=Verdict.TIGHT if cache and held < need.typical else Verdict.FITS,
        missing_cache_gib=max(0.0, need.one_sequence - held) if demand.in_vllm else 0.0,
    )
    return replace(plan, verdict=Verdict.TOO_LARGE) if plan.excess_gib or plan.missing_cache_gib else plan


def _fixed_parts(demand: Demand) -> tuple[Part, ...]:
    """Everything but the key-value cache."""
    weights, adapters, update = _weights(demand), _adapters(demand), _update(demand)
    parts = (weights, *adapters, *update, *_engine(demand), _overhead(demand), *_exchange(demand))
    if not demand.shares_weights:
        return parts
    later = sum(part.gib for part in update)
    return (*parts, Part("start-up", max(0.0, weights.gib - later), "a second copy, before there are activations"))


def _weights(demand: Demand) -> Part:
    copies = 2 if demand.in_vllm and not demand.shares_weights else 1
    note = f"{demand.shape.parameters / 1e9:.2f} G parameters, {demand.dtype}"
    if demand.in_vllm:
        note += ", the trainer's and vLLM's" if copies == 2 else ", one copy for trainer and vLLM"
    return Part("base weights", copies * demand.shape.parameters * demand.dtype_bytes / GIB, note)


def _adapters(demand: Demand) -> tuple[Part, ...]:
    shape, rank, verifier_rank = demand.shape, demand.config.lora.rank, demand.verifier_rank
    policy, verifier = shape.adapter_parameters(rank), shape.adapter_parameters(verifier_rank)
    return (
        Part("policy adapter", 16 * policy / GIB, f"{policy / 1e6:.1f} M: float32, gradients, two AdamW moments"),
        Part("Verifier", 8 * verifier / GIB, f"rank {verifier_rank or 'of each matrix'}: float32 adapter and average"),
    )


def _update(demand: Demand) -> tuple[Part, ...]:
    config, shape, tokens = demand.config, demand.shape, demand.microbatch_tokens
    kept, checkpointed = _activation_bytes(demand), config.update.gradient_checkpointing != "off"
    logits = LOGIT_TENSORS * min(LOGIT_CHUNK_GIB[demand.on_gpu], 4 * shape.vocabulary * tokens / GIB)
    image = shape.image_tokens(config.model.max_pixels) * shape.hidden * (1 + shape.vision_taps) * demand.dtype_bytes
    features = min(FEATURE_CACHE_GIB, config.steps * demand.num_images * image / GIB)
    return (
        Part(
            "activations",
            kept / GIB + logits,
            f"{tokens:,} tokens, every layer's {'recomputed' if checkpointed else 'kept'}; estimate",
        ),
        Part("image features", features, "the trainer's cache"),
    )


def _activation_bytes(demand: Demand) -> int:
    """Of the longest micro-batch; with checkpointing at its utmost: every layer is computed again."""
    shape, update = demand.shape, demand.config.update
    widths = shape.hidden, shape.query, shape.key, shape.mlp
    model = ActivationModel(*widths, shape.layers, demand.dtype_bytes)
    rounded = demand.config.engine.kind in ENGINES_WITH_THEIR_OWN_MODEL
    compiled = COMPILED if rounded else COMPILED_FLOAT32_ADAPTERS
    counts = compiled if demand.on_gpu and update.compile_layers else EAGER
    num_recomputed = 0 if update.gradient_checkpointing == "off" else shape.layers
    return model.num_bytes(demand.microbatch_tokens, num_recomputed, counts)


def _engine(demand: Demand) -> tuple[Part, ...]:
    """What vLLM takes beside weights and cache: adapter slots, one pass of prompts, sampling, encoded images."""
    if not demand.in_vllm:
        return ()
    shape, config = demand.shape, demand.config
    rank = max(config.lora.rank, demand.verifier_rank or max(min(matrix) for matrix in shape.matrices))
    num_slots = vllm_adapter_slots(NUM_ADAPTERS, demand.on_gpu) if config.engine.layout == "adapters" else 0
    slots = num_slots * shape.adapter_parameters(rank) * demand.dtype_bytes
    tokens = vllm_batch_tokens(demand.on_gpu, config.model.context, config.engine.max_batch_sequences)
    prefill = tokens * (4 * shape.hidden + 2 * shape.mlp) * demand.dtype_bytes
    images = tokens * shape.hidden * (1 + shape.vision_taps) * demand.dtype_bytes
    sampling = config.engine.max_batch_sequences * shape.vocabulary * SAMPLING_BYTES
    return (
        Part("vLLM's adapter slots", slots / GIB, f"{num_slots} of rank {rank}"),
        Part("vLLM's work", (prefill + images + sampling) / GIB, "prompts, images, sampling; estimate"),
    )


def _overhead(demand: Demand) -> Part:
    if not demand.on_gpu:
        return Part("processes", CONTEXT_GIB, "assumed")
    vllm, own = demand.in_vllm, demand.config.engine.kind == "transformers"
    captures = (vllm and not demand.config.engine.vllm.enforce_eager) or (own and demand.config.engine.cuda_graphs)
    note = f"assumed: {'two processes' if vllm else 'one process'}{', captured graphs' if captures else ''}"
    return Part("CUDA contexts", (2 if vllm else 1) * CONTEXT_GIB + captures * GRAPHS_GIB, note)


def _exchange(demand: Demand) -> tuple[Part, ...]:
    """What workers need to sum their gradients; on a CPU they meet in host memory."""
    if not demand.on_gpu or demand.workers == 1:
        return ()
    return (Part("NCCL's buffers", NCCL_GIB, f"assumed: {demand.workers} workers sum their gradients"),)


def _cache_part(demand: Demand, memory_gib: float) -> tuple[Part, ...]:
    """The key-value cache of an engine on this card; none for servers, nor for the user's own engine."""
    config, shape, need = demand.config, demand.shape, demand.cache_need()
    if demand.in_vllm:
        unset = _planned_kv(demand, memory_gib) if demand.on_gpu else VLLM_CPU_CACHE_GIB
        gib = config.engine.vllm.kv_cache_gib or unset
    elif config.engine.kind == "transformers":
        room = memory_gib - shape.parameters * demand.dtype_bytes / GIB
        gib = min(need.worst, max(0.0, ARENA_SHARE * room))
    else:
        return ()
    tokens = int(gib * GIB / need.bytes_per_token)
    return (Part("key-value cache", gib, f"{tokens:,} tokens of {need.bytes_per_token:,} bytes"),)


def _advise(demand: Demand, plan: MemoryPlan) -> Iterator[str]:
    """Settings that each lift the verdict by themselves; where none does, the fewest and mildest that do together."""

    def lifts(settings: Sequence[_Setting]) -> bool:
        changed = replace(demand, config=_changed(demand.config, settings))
        return _RANK[_weigh(changed, plan.memory_gib).verdict] < _RANK[plan.verdict]

    ladders = [ladder for ladder in _ladders(demand, plan) if ladder]
    alone = [setting for ladder in ladders if (setting := next((s for s in ladder if lifts([s])), None))]
    if alone:
        yield from map(str, alone)
    elif together := _fewest(ladders, lifts):
        yield " ".join(map(str, together))


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value for a dotted key; its text is an override."""

    key: str
    value: bool | int | float | str

    def __str__(self) -> str:
        return f"{self.key}={str(self.value).lower()}"


def _fewest(ladders: Sequence[Sequence[_Setting]], lifts: Callable[[Sequence[_Setting]], bool]) -> Sequence[_Setting]:
    """At most one setting of each ladder that lift together: the last ladders are left alone where the first do, then
    each setting, the most felt first, is dropped or made milder while the others carry it. Empty: nothing lifts."""
    chosen: dict[int, _Setting] = {}
    for place, ladder in enumerate(ladders):
        chosen[place] = ladder[-1]
        if lifts([*chosen.values()]):
            break
    else:
        return []
    for place in reversed(list(chosen)):
        others = {other: setting for other, setting in chosen.items() if other != place}
        if lifts([*others.values()]):
            chosen = others
        else:
            chosen[place] = next(s for s in ladders[place] if lifts([*others.values(), s]))
    return list(chosen.values())


def _ladders(demand: Demand, plan: MemoryPlan) -> Iterator[list[_Setting]]:
    """Of each key that saves memory, the least felt first, values from the least to the most drastic; all are valid."""
    config, vllm = demand.config, demand.config.engine.vllm
    if demand.in_vllm and not vllm.share_weights:
        yield [_Setting("engine.vllm.share_weights", True)]
    if config.update.gradient_checkpointing == "off":
        yield [_Setting("update.gradient_checkpointing", "auto")]
    if demand.in_vllm and (vllm.kv_cache_gib is not None or not demand.on_gpu):
        least, planned = _rounded_up(plan.cache.one_sequence), _planned_kv(demand, plan.memory_gib)
        yield [_Setting("engine.vllm.kv_cache_gib", max(least, math.floor(10 * planned) / 10))]
    if config.engine.kind == "transformers" and plan.verdict is Verdict.TOO_LARGE:
        yield _halved("engine.max_batch_sequences", demand.num_sequences, 8)
    yield _halved("update.tokens_per_microbatch", config.update.tokens_per_microbatch, 1024)
    longest = demand.prompt_tokens + max(config.roles.policy_tokens, config.roles.verifier_tokens)
    if longest < config.model.context:
        yield [_Setting("model.context", longest)]
    yield _halved("model.max_pixels", config.model.max_pixels, config.model.min_pixels)
    yield _halved("roles.policy_tokens", config.roles.policy_tokens, 512)
    yield _halved("roles.verifier_tokens", config.roles.verifier_tokens, 256)
    yield _halved("images.per_step", demand.num_images, 1, demand.workers)


def _halved(key: str, value: int, least: int, unit: int = 1) -> list[_Setting]:
    """The value in units of ``unit``, halved once, twice ..., not below ``least``."""
    return [_Setting(key, unit * (value >> times)) for times in range(1, value.bit_length()) if value >> times >= least]


def _rounded_up(gib: float) -> float:
    """``2.8147 -> 2.82``"""
    return math.ceil(100 * gib) / 100


def _changed(config: Config, settings: Sequence[_Setting]) -> Config:
    for setting in settings:
        config = _with(config, setting.key.split("."), setting.value)
    return config


def _with(section: SectionType, path: Sequence[str], value: object) -> SectionType:
    """A copy with one leaf replaced; not validated."""
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
