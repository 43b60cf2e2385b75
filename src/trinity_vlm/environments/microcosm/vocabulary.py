"""The words of the microcosm. Every answer is one of these or a number."""

from __future__ import annotations

from typing import Literal

COLOURS: tuple[str, ...] = ("red", "green", "blue", "yellow", "purple", "orange", "pink", "cyan")
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross")
SIZES: tuple[str, ...] = ("small", "big")
COLUMNS = "abcd"
ROWS = "1234"
CELLS: tuple[str, ...] = tuple(column + row for row in ROWS for column in COLUMNS)
"""Reading order: a1 is top left, d1 top right, d4 bottom right."""

LABELS = "BCDEFGHKLMNP"
"""Chart labels. A and I are left out: questions are read without regard to case and articles."""
AXIS_MAXIMA: tuple[int, ...] = (10, 20, 50, 100)
VALUE_STEPS = 10
"""Chart values are multiples of axis maximum / VALUE_STEPS."""

Attribute = Literal["colour", "shape", "size"]
ATTRIBUTES: tuple[Attribute, ...] = ("colour", "shape", "size")
Relation = Literal["left of", "right of", "above", "below"]
RELATIONS: tuple[Relation, ...] = ("left of", "right of", "above", "below")
Edge = Literal["leftmost", "rightmost", "topmost", "bottommost"]
EDGES: tuple[Edge, ...] = ("leftmost", "rightmost", "topmost", "bottommost")
Extremum = Literal["highest", "lowest"]
EXTREMA: tuple[Extremum, ...] = ("highest", "lowest")
MarkKind = Literal["bar", "point"]
MARK_KINDS: tuple[MarkKind, ...] = ("bar", "point")
