"""A fake engine that answers from a script: for tests of episodes, here and in users' own projects.

engine = ScriptedEngine({CallType.PROPOSE: ['...</think>{"question": "How many?", "answer": "3"}'], ...})
engine = ScriptedEngine(lambda request: [my_answer(request)] * request.n)

An episode asks for each sample alone; ``request.first`` says which of its call it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trinity_vlm.engine.protocol import GenerationRequest
from trinity_vlm.errors import EngineError
from trinity_vlm.types import CallType, Completion

if TYPE_CHECKING:
    import torch

TRUNCATED = "<|truncated|>"
END_ID = 0

Script = Callable[[GenerationRequest], Sequence[str]] | Mapping[CallType, Sequence[str]]


class ScriptedEngine:
    """Answers without a model. A text that ends with ``TRUNCATED`` comes back without it, cut off by its budget.

    script: a function from a request to its ``n`` texts, or texts per call type. Those of a call type are handed out
        in order over all its requests, from the start again when they run out.
    requests: everything that was asked, in order
    loaded: (name, version) of every adapter load

    Token ids are made up: code point + 1 per character, ``END_ID`` at the end of a turn.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._handed_out: dict[CallType, int] = {}
        self.requests: list[GenerationRequest] = []
        self.loaded: list[tuple[str, int]] = []

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Nothing is batched, so there is nothing to hold."""
        yield

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """The script's texts; raises EngineError when it has none for the call, or not ``request.n``."""
        self.requests.append(request)
        texts = list(self._script(request)) if callable(self._script) else self._next_texts(self._script, request)
        if len(texts) != request.n:
            raise EngineError(f"the script gave {len(texts)} texts for a {request.call} call of {request.n}")
        prompt_ids = fake_token_ids("".join(m.text for m in request.prompt.messages) + request.prompt.assistant_prefix)
        return [scripted_completion(text, prompt_ids, request.want_logprobs) for text in texts]

    def close(self) -> None:
        """Nothing to let go of."""

    def load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Take note of the load."""
        self.loaded.append((name, version))

    def _next_texts(self, script: Mapping[CallType, Sequence[str]], request: GenerationRequest) -> list[str]:
        texts = script.get(request.call)
        if not texts:
            raise EngineError(f"the script has no text for a {request.call} call")
        start = self._handed_out.get(request.call, 0)
        self._handed_out[request.call] = start + request.n
        return [texts[i % len(texts)] for i in range(start, start + request.n)]


def fake_token_ids(text: str) -> tuple[int, ...]:
    """One id per character; none of them is ``END_ID``."""
    return tuple(ord(character) + 1 for character in text)


def scripted_completion(text: str, prompt_ids: tuple[int, ...] = (), want_logprobs: bool = False) -> Completion:
    """A completion of ``text`` with made-up ids; log-probabilities, when wanted, are -1 per token."""
    truncated = text.endswith(TRUNCATED)
    text = text.removesuffix(TRUNCATED)
    ids = fake_token_ids(text) + (() if truncated else (END_ID,))
    return Completion(
        prompt_ids, ids, text, "length" if truncated else "stop", (-1.0,) * len(ids) if want_logprobs else None
    )
