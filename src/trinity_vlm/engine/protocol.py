"""The one small interface between episodes and whatever generates text.

    episode coroutines --GenerationRequest--> engine --list[Completion]--> episode coroutines

An engine owns batching, sampling and adapters; an episode owns what is asked and what an answer means.
Nothing in an episode sleeps, polls or knows about batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from trinity_vlm.types import CallType, Completion, Prompt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1.0 switch the filters off.

    ``max_tokens`` is the call's own budget; the engine lowers it to what the context leaves.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call, or a part of it: ``n`` samples of one prompt under one adapter.

    adapter: name of a loaded adapter ("policy", "verifier"), or None for the bare base model
    seed: sample i of the call draws from ``derive_seed(seed, i)``: its tokens don't depend on the batch it ran in.
        (A server asked for several at once draws them all from the first one's.)
    first: the call's sample that is this request's first; a caller that acts on each sample as soon as it ends asks for
        them one by one
    order_key: where the request stands among those of the same instant: (image uid, call, slot or sample, attempt)
    json_schema: enforced on the completion when given (Verifier calls only: it would change a policy);
        with ``schema_after`` set the completion is free until that string (a closing thinking tag) was produced
    """

    prompt: Prompt
    adapter: str | None
    sampling: Sampling
    seed: int
    call: CallType
    order_key: tuple[str | int, ...]
    n: int = 1
    first: int = 0
    json_schema: Mapping[str, Any] | None = None
    schema_after: str | None = None
    want_logprobs: bool = False


@runtime_checkable
class Engine(Protocol):
    """What an episode may ask of a generation backend."""

    def episode(self) -> AbstractContextManager[None]:
        """Held by a coroutine for as long as it may send requests.

        A batching engine dispatches when every coroutine inside such a block waits for it. Between two awaits of
        ``generate`` (or a gather of several) the holder must not await anything else.
        """
        ...

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Return ``request.n`` completions, in sample order.

        A prompt that leaves no room for one token gives completions with no tokens and ``finish_reason="length"``.
        Raises EngineError for an unknown adapter or a dead backend.
        """
        ...

    def close(self) -> None:
        """Let go of processes, files and connections; nothing may be asked afterwards. Harmless when called twice."""
        ...

    def load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Replace adapter ``name`` by ``state`` (PEFT keys). No request may be in flight.

        Raises EngineError when the keys don't match the adapter's.
        """
        ...
