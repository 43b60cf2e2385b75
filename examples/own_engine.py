"""An engine of your own: the in-process one, with a count of what every kind of call costs.

    PYTHONPATH=examples trinity-vlm train tiny steps=5 engine.kind=own_engine:counting

A factory gets the backbone and the whole configuration. An engine has three methods; see
``trinity_vlm.engine.protocol``. A line with the tokens generated so far is printed after each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import Config
from trinity_vlm.engine.protocol import Engine, GenerationRequest
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.types import POLICY, CallType, Completion


class CountingEngine:
    """Passes everything on to ``inner``. tokens: completion tokens by kind of call since the start."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.tokens: Counter[CallType] = Counter()

    def episode(self) -> AbstractContextManager[None]:
        return self.inner.episode()

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        completions = await self.inner.generate(request)
        self.tokens[request.call] += sum(len(completion.token_ids) for completion in completions)
        return completions

    def close(self) -> None:
        self.inner.close()

    def load_adapter(self, name: str, version: int, state: Mapping[str, Tensor]) -> None:
        """Called for both adapters after each step, when no request is in flight."""
        self.inner.load_adapter(name, version, state)
        if name == POLICY and self.tokens:
            print("tokens generated:", ", ".join(f"{call} {count:,}" for call, count in sorted(self.tokens.items())))


def counting(backbone: Backbone, config: Config) -> CountingEngine:
    """What ``engine.kind`` names: called once, with the loaded backbone."""
    settings = config.engine
    return CountingEngine(TransformersEngine(backbone, settings.max_batch_sequences, settings.cuda_graphs))
