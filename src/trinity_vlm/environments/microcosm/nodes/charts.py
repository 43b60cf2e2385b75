"""Nodes over charts: sets of marks and single marks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trinity_vlm.environments.microcosm.nodes.base import Marks, Node, Selection, Steps, names_of, only_one
from trinity_vlm.environments.microcosm.scenes import ChartScene, Mark, Scene
from trinity_vlm.environments.microcosm.vocabulary import Extremum, MarkKind
from trinity_vlm.environments.protocol import Failure


@dataclass(frozen=True, slots=True)
class Plotted:
    """All marks of a chart of one kind."""

    kind: MarkKind

    def run(self, scene: Scene, steps: Steps) -> Marks:
        if not isinstance(scene, ChartScene) or scene.kind != self.kind:
            raise steps.fail(Failure.OTHER_DOMAIN, f"no {self.kind}s")
        return Selection(scene.marks)


@dataclass(frozen=True, slots=True)
class Labelled:
    """The mark with a label."""

    source: Node[Marks]
    label: str

    def run(self, scene: Scene, steps: Steps) -> Mark:
        kept = [mark for mark in self.source.run(scene, steps).items if mark.label == self.label]
        if not kept:
            steps.add(f"{self.label}: none")
        return only_one(kept, steps)


@dataclass(frozen=True, slots=True)
class Coloured:
    """The mark of a colour."""

    source: Node[Marks]
    colour: str

    def run(self, scene: Scene, steps: Steps) -> Mark:
        kept = [mark for mark in self.source.run(scene, steps).items if mark.colour == self.colour]
        steps.add(f"{self.colour}: {names_of(kept)}")
        return only_one(kept, steps)


@dataclass(frozen=True, slots=True)
class Extreme:
    """The highest or lowest mark; a tie is ambiguous."""

    source: Node[Marks]
    which: Extremum

    def run(self, scene: Scene, steps: Steps) -> Mark:
        marks = self.source.run(scene, steps).items
        value = (max if self.which == "highest" else min)(mark.value for mark in marks)
        kept = [mark for mark in marks if mark.value == value]
        steps.add(f"{self.which} {value}: {names_of(kept)}")
        return only_one(kept, steps)


@dataclass(frozen=True, slots=True)
class ExtremeValue:
    """The highest or lowest value; ties don't matter."""

    source: Node[Marks]
    which: Extremum

    def run(self, scene: Scene, steps: Steps) -> int:
        marks = self.source.run(scene, steps).items
        value = (max if self.which == "highest" else min)(mark.value for mark in marks)
        steps.add(f"{self.which} {value}")
        return value


@dataclass(frozen=True, slots=True)
class Beyond:
    """The marks strictly above or below a number."""

    source: Node[Marks]
    side: Literal["above", "below"]
    threshold: Node[int]

    def run(self, scene: Scene, steps: Steps) -> Marks:
        marks = self.source.run(scene, steps).items
        threshold = self.threshold.run(scene, steps)
        sign = 1 if self.side == "above" else -1
        kept = tuple(mark for mark in marks if sign * mark.value > sign * threshold)
        steps.add(f"{self.side} {threshold}: {names_of(kept)}")
        return Selection(kept)


@dataclass(frozen=True, slots=True)
class Turns:
    """How many segments of the line go up or down."""

    source: Node[Marks]
    direction: Literal["rise", "fall"]

    def run(self, scene: Scene, steps: Steps) -> int:
        marks = self.source.run(scene, steps).items
        sign = 1 if self.direction == "rise" else -1
        ends = [b for a, b in pairwise(marks) if sign * b.value > sign * a.value]
        steps.add(f"{self.direction} to: {names_of(ends)} = {len(ends)}")
        return len(ends)
