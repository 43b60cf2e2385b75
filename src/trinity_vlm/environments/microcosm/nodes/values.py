"""Nodes that yield words, numbers and truth values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trinity_vlm.environments.microcosm.nodes.base import Marks, Node, Steps, Things, name_of
from trinity_vlm.environments.microcosm.scenes import Mark, Scene, Thing


@dataclass(frozen=True, slots=True)
class Query:
    """An attribute of one item: colour, shape or size of a thing, colour or label of a mark."""

    source: Node[Thing] | Node[Mark]
    attribute: str

    def run(self, scene: Scene, steps: Steps) -> str:
        item = self.source.run(scene, steps)
        value: str = getattr(item, self.attribute)
        if self.attribute != "label":
            steps.add(f"{name_of(item)} is {value}")
        return value


@dataclass(frozen=True, slots=True)
class Value:
    """The number a mark shows."""

    source: Node[Mark]

    def run(self, scene: Scene, steps: Steps) -> int:
        mark = self.source.run(scene, steps)
        steps.add(f"{mark.label} is {mark.value}")
        return mark.value


@dataclass(frozen=True, slots=True)
class Number:
    """A number given in the question."""

    value: int

    def run(self, scene: Scene, steps: Steps) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class Count:
    """The size of a set."""

    source: Node[Things] | Node[Marks]

    def run(self, scene: Scene, steps: Steps) -> int:
        count = len(self.source.run(scene, steps).items)
        steps.extend(f" = {count}")
        return count


@dataclass(frozen=True, slots=True)
class Exist:
    """Whether a set has members."""

    source: Node[Things]

    def run(self, scene: Scene, steps: Steps) -> bool:
        return bool(self.source.run(scene, steps).items)


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of the values of a set, added up from left to right; 0 for the empty set."""

    source: Node[Marks]

    def run(self, scene: Scene, steps: Steps) -> int:
        values = [mark.value for mark in self.source.run(scene, steps).items]
        total = values[0] if values else 0
        if len(values) < 2:
            steps.add(f"sum {total}")
        for value in values[1:]:
            steps.add(f"{total} + {value} = {total + value}")
            total += value
        return total


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """plus, minus, or difference (larger minus smaller)."""

    left: Node[int]
    operation: Literal["plus", "minus", "difference"]
    right: Node[int]

    def run(self, scene: Scene, steps: Steps) -> int:
        left, right = self.left.run(scene, steps), self.right.run(scene, steps)
        if self.operation == "difference":
            left, right = max(left, right), min(left, right)
        result = left + right if self.operation == "plus" else left - right
        steps.add(f"{left} {'+' if self.operation == 'plus' else '-'} {right} = {result}")
        return result


@dataclass(frozen=True, slots=True)
class MoreThan:
    """Whether one number is larger than another."""

    left: Node[int]
    right: Node[int]

    def run(self, scene: Scene, steps: Steps) -> bool:
        left, right = self.left.run(scene, steps), self.right.run(scene, steps)
        steps.add(f"{left} > {right}")
        return left > right
