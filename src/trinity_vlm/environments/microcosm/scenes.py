"""Scenes as plain data: what there is, never how it is drawn. Edits make a new scene with ``dataclasses.replace``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from trinity_vlm.environments.microcosm.style import Style
from trinity_vlm.environments.microcosm.vocabulary import (
    AXIS_MAXIMA,
    CELLS,
    COLOURS,
    COLUMNS,
    LABELS,
    ROWS,
    SHAPES,
    SIZES,
    VALUE_STEPS,
    MarkKind,
)


@dataclass(frozen=True, slots=True)
class Thing:
    """One coloured shape. ``cell`` is column letter and row digit, ``"b3"``."""

    cell: str
    size: str
    colour: str
    shape: str

    @property
    def column(self) -> int:
        """0 (left) to 3."""
        return COLUMNS.index(self.cell[0])

    @property
    def row(self) -> int:
        """0 (top) to 3."""
        return ROWS.index(self.cell[1])


@dataclass(frozen=True, slots=True)
class Mark:
    """One bar or point of a chart."""

    label: str
    colour: str
    value: int


@dataclass(frozen=True, slots=True)
class ShapesScene:
    """Shapes on a 4x4 grid, things in reading order, at most one a cell. ``seed`` fixes jitter and noise."""

    things: tuple[Thing, ...]
    style: Style
    seed: int


@dataclass(frozen=True, slots=True)
class ChartScene:
    """A bar or line chart, marks from left to right in label order. ``kind`` names a mark: "bar" or "point"."""

    kind: MarkKind
    marks: tuple[Mark, ...]
    axis_max: int
    style: Style
    seed: int

    @property
    def unit(self) -> int:
        """Distance between neighbouring values."""
        return self.axis_max // VALUE_STEPS


Scene: TypeAlias = ShapesScene | ChartScene


def sample_scene(rng: Random, style: Style, domain: str | None = None) -> Scene:
    """Draw a scene; ``domain`` is "shapes", "bar" or "point", drawn 2:1:1 when unset."""
    domain = domain or rng.choice(("shapes", "shapes", "bar", "point"))
    return (
        _sample_shapes(rng, style)
        if domain == "shapes"
        else _sample_chart(rng, style, "bar" if domain == "bar" else "point")
    )


def domain_of(scene: Scene) -> str:
    """ "shapes", "bar" or "point"."""
    return scene.kind if isinstance(scene, ChartScene) else "shapes"


def reading_order(things: Iterable[Thing]) -> tuple[Thing, ...]:
    """Row by row from the top left."""
    return tuple(sorted(things, key=lambda thing: (thing.row, thing.column)))


def listing(scene: Scene) -> str:
    """Everything in the scene in fixed order: ``a1 big red star, c2 ...`` or ``B red 40, C ...``."""
    if isinstance(scene, ShapesScene):
        return ", ".join(f"{t.cell} {t.size} {t.colour} {t.shape}" for t in scene.things)
    return ", ".join(f"{m.label} {m.colour} {m.value}" for m in scene.marks)


def _sample_shapes(rng: Random, style: Style) -> ShapesScene:
    count = rng.randint(round(style.things_min), round(style.things_max))
    things = [
        Thing(cell, rng.choice(SIZES), rng.choice(COLOURS), rng.choice(SHAPES)) for cell in rng.sample(CELLS, count)
    ]
    return ShapesScene(reading_order(things), style, rng.getrandbits(32))


def _sample_chart(rng: Random, style: Style, kind: MarkKind) -> ChartScene:
    count = rng.randint(round(style.marks_min), round(style.marks_max))
    axis_max = rng.choice(AXIS_MAXIMA)
    unit = axis_max // VALUE_STEPS
    marks = tuple(
        Mark(label, colour, rng.randint(1, VALUE_STEPS) * unit)
        for label, colour in zip(sorted(rng.sample(LABELS, count)), rng.sample(COLOURS, count), strict=True)
    )
    return ChartScene(kind, marks, axis_max, style, rng.getrandbits(32))
