"""Nodes over shapes scenes: sets of things and single things."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_vlm.environments.microcosm.descriptions import Description
from trinity_vlm.environments.microcosm.nodes.base import Node, Selection, Steps, Things, names_of, only_one
from trinity_vlm.environments.microcosm.scenes import Scene, ShapesScene, Thing
from trinity_vlm.environments.microcosm.vocabulary import Attribute, Edge, Relation
from trinity_vlm.environments.protocol import Failure


@dataclass(frozen=True, slots=True)
class Objects:
    """All things of a shapes scene."""

    def run(self, scene: Scene, steps: Steps) -> Things:
        if not isinstance(scene, ShapesScene):
            raise steps.fail(Failure.OTHER_DOMAIN, "no shapes")
        return Selection(scene.things)


@dataclass(frozen=True, slots=True)
class Filter:
    """The things of a set that fit a description."""

    source: Node[Things]
    description: Description

    def run(self, scene: Scene, steps: Steps) -> Things:
        source = self.source.run(scene, steps)
        kept = tuple(thing for thing in source.items if self.description.matches(thing))
        phrase = f"{self.description.phrase()} {source.where}".rstrip()
        steps.add(f"{phrase}: {names_of(kept)}")
        return Selection(kept, source.where)


@dataclass(frozen=True, slots=True)
class Unique:
    """The only thing of a set."""

    source: Node[Things]

    def run(self, scene: Scene, steps: Steps) -> Thing:
        return only_one(self.source.run(scene, steps).items, steps)


@dataclass(frozen=True, slots=True)
class Relate:
    """All things whose cell lies strictly in a direction of the anchor's column or row."""

    anchor: Node[Thing]
    relation: Relation

    def run(self, scene: Scene, steps: Steps) -> Things:
        anchor = self.anchor.run(scene, steps)
        things = Objects().run(scene, steps).items
        kept = tuple(thing for thing in things if _related(thing, anchor, self.relation))
        return Selection(kept, f"{self.relation} {anchor.cell}")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The thing in the very next cell in a direction."""

    anchor: Node[Thing]
    relation: Relation

    def run(self, scene: Scene, steps: Steps) -> Thing:
        anchor = self.anchor.run(scene, steps)
        things = Objects().run(scene, steps).items
        nearby = (t for t in things if abs(t.column - anchor.column) + abs(t.row - anchor.row) == 1)
        kept = tuple(thing for thing in nearby if _related(thing, anchor, self.relation))
        steps.add(f"just {self.relation} {anchor.cell}: {names_of(kept)}")
        return only_one(kept, steps)


@dataclass(frozen=True, slots=True)
class SameAs:
    """All other things that share an attribute with the anchor."""

    anchor: Node[Thing]
    attribute: Attribute

    def run(self, scene: Scene, steps: Steps) -> Things:
        anchor = self.anchor.run(scene, steps)
        shared = getattr(anchor, self.attribute)
        things = Objects().run(scene, steps).items
        kept = tuple(t for t in things if t != anchor and getattr(t, self.attribute) == shared)
        steps.add(f"other {shared}: {names_of(kept)}")
        return Selection(kept)


@dataclass(frozen=True, slots=True)
class Outermost:
    """The thing furthest towards one edge; a tie is ambiguous."""

    source: Node[Things]
    edge: Edge

    def run(self, scene: Scene, steps: Steps) -> Thing:
        things = self.source.run(scene, steps).items
        sign = -1 if self.edge in ("rightmost", "bottommost") else 1
        axis = "column" if self.edge in ("leftmost", "rightmost") else "row"
        nearest = min((sign * getattr(t, axis) for t in things), default=0)
        kept = tuple(t for t in things if sign * getattr(t, axis) == nearest)
        steps.add(f"{self.edge}: {names_of(kept)}")
        return only_one(kept, steps)


def _related(thing: Thing, anchor: Thing, relation: Relation) -> bool:
    if relation == "left of":
        return thing.column < anchor.column
    if relation == "right of":
        return thing.column > anchor.column
    return thing.row < anchor.row if relation == "above" else thing.row > anchor.row
