"""What supervised training reads: prompts with the completions they should get, in numbered batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trinity_vlm.types import Prompt


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """One target: ``completion`` continues the prompt, its ``assistant_prefix`` included, up to the end of the turn."""

    prompt: Prompt
    completion: str


class ExampleSource(Protocol):
    """A supply of training batches. It is sent to worker processes, so it must pickle.

    ``batch(i)`` is a pure function of ``i``: the data order depends neither on the number of workers nor on timing.
    """

    def __len__(self) -> int:
        """Number of batches."""
        ...

    def batch(self, index: int) -> Sequence[SupervisedExample]:
        """The examples of one optimizer step."""
        ...
