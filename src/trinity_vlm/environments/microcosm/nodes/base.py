"""What every node shares: the trace, the failure of a premise, sets of items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from trinity_vlm.environments.microcosm.scenes import Mark, Scene, Thing
from trinity_vlm.environments.protocol import Failure

Item = Thing | Mark
ItemT = TypeVar("ItemT", Thing, Mark)
ValueT_co = TypeVar("ValueT_co", covariant=True)


class Stop(Exception):
    """A premise failed; the last step says which."""

    def __init__(self, reason: Failure) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Steps:
    """The growing trace of one execution."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)

    def extend(self, suffix: str) -> None:
        self.lines[-1] += suffix

    def fail(self, reason: Failure, line: str) -> Stop:
        self.add(line)
        return Stop(reason)


class Node(Protocol[ValueT_co]):
    """Anything that yields a value in a scene."""

    def run(self, scene: Scene, steps: Steps) -> ValueT_co: ...


@dataclass(frozen=True, slots=True)
class Selection(Generic[ItemT]):
    """A set of items in scene order; ``where`` words the restriction that made it (``left of b2``)."""

    items: tuple[ItemT, ...]
    where: str = ""


Things = Selection[Thing]
Marks = Selection[Mark]


def name_of(item: Item) -> str:
    """A thing goes by its cell, a mark by its label."""
    return item.cell if isinstance(item, Thing) else item.label


def names_of(items: Sequence[Item]) -> str:
    return " ".join(name_of(item) for item in items) or "none"


def only_one(items: Sequence[ItemT], steps: Steps) -> ItemT:
    """The single item; Stop when there is none or more than one."""
    if not items:
        raise steps.fail(Failure.MISSING, "missing")
    if len(items) > 1:
        raise steps.fail(Failure.AMBIGUOUS, "not unique")
    return items[0]
