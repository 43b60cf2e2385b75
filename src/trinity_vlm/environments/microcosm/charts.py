"""Bar and line charts: letter labels below, a numeric axis with a tick at every value on the left."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw

from trinity_vlm.environments.microcosm.canvas import SIDE, Colour, faded, glyphs, ink, shape_mask, tinted
from trinity_vlm.environments.microcosm.scenes import ChartScene
from trinity_vlm.environments.microcosm.vocabulary import VALUE_STEPS

AXIS_X = 24
BASELINE_Y = 112
PLOT_HEIGHT = 100
RIGHT_MARGIN = 4
LABELLED_STEPS = (0, VALUE_STEPS // 2, VALUE_STEPS)
MAX_MARKS = 12


def value_y(scene: ChartScene, value: float) -> float:
    """Pixel row of a value."""
    return BASELINE_Y - PLOT_HEIGHT * scene.style.plot_scale * value / scene.axis_max


def slot_centre(scene: ChartScene, index: int) -> float:
    """Pixel column of the index-th mark."""
    return AXIS_X + 2 + _slot_width(scene) * (index + 0.5)


def draw_chart(image: Image.Image, scene: ChartScene, level: int, rng: np.random.Generator) -> None:
    """Draw axis, labels and marks onto ``image``, whose background is grey ``level``."""
    draw = ImageDraw.Draw(image)
    tints = rng.uniform(-1, 1, (MAX_MARKS, 3))
    colours = [tinted(scene.style, mark.colour, tint) for mark, tint in zip(scene.marks, tints, strict=False)]
    _draw_axis(image, draw, scene, level)
    if scene.kind == "bar":
        _draw_bars(draw, scene, level, colours)
    else:
        _draw_line(image, draw, scene, level, colours)
    for index, mark in enumerate(scene.marks):
        glyph = glyphs(mark.label, 11)
        image.paste(ink(level), (round(slot_centre(scene, index) - glyph.width / 2), BASELINE_Y + 4), glyph)


def _slot_width(scene: ChartScene) -> float:
    return (SIDE - AXIS_X - RIGHT_MARGIN) / len(scene.marks)


def _draw_axis(image: Image.Image, draw: ImageDraw.ImageDraw, scene: ChartScene, level: int) -> None:
    colour = ink(level)
    top = round(value_y(scene, scene.axis_max))
    for step in range(VALUE_STEPS + 1):
        value = step * scene.unit
        y = round(value_y(scene, value))
        labelled = step in LABELLED_STEPS
        if scene.style.grid:
            draw.line((AXIS_X, y, SIDE - 2, y), fill=faded(colour, level, scene.style.grid))
        draw.line((AXIS_X - (4 if labelled else 2), y, AXIS_X, y), fill=colour)
        if labelled:
            glyph = glyphs(str(value), 9)
            image.paste(colour, (AXIS_X - 6 - glyph.width, y - glyph.height // 2), glyph)
    draw.line((AXIS_X, top, AXIS_X, BASELINE_Y, SIDE - 2, BASELINE_Y), fill=colour)


def _draw_bars(draw: ImageDraw.ImageDraw, scene: ChartScene, level: int, colours: list[Colour]) -> None:
    half = _slot_width(scene) * scene.style.bar_width / 2
    edge = faded(ink(level), level, scene.style.outline) if scene.style.outline else None
    for index, (mark, colour) in enumerate(zip(scene.marks, colours, strict=True)):
        x = slot_centre(scene, index)
        box = (round(x - half), round(value_y(scene, mark.value)), round(x + half), BASELINE_Y - 1)
        draw.rectangle(box, fill=colour, outline=edge)


def _draw_line(
    image: Image.Image, draw: ImageDraw.ImageDraw, scene: ChartScene, level: int, colours: list[Colour]
) -> None:
    style = scene.style
    centres = [(slot_centre(scene, i), value_y(scene, mark.value)) for i, mark in enumerate(scene.marks)]
    stroke = faded(ink(level), level, 0.55)
    for start, end in pairwise(centres):
        _draw_dashes(draw, start, end, stroke, round(style.line_width), style.line_gap)
    edge = faded(ink(level), level, style.outline) if style.outline else None
    for (x, y), colour in zip(centres, colours, strict=True):
        for fill, radius in [(edge, 5.25), (colour, 4.0)] if edge else [(colour, 4.5)]:
            mask = shape_mask("circle", radius)
            image.paste(fill, (round(x) - mask.width // 2, round(y) - mask.height // 2), mask)


def _draw_dashes(
    draw: ImageDraw.ImageDraw,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: Colour,
    width: int,
    gap: float,
) -> None:
    """A straight line of four-pixel-or-longer dashes; ``gap`` is the share of each period left blank."""
    length = float(np.hypot(end[0] - start[0], end[1] - start[1]))
    periods = max(1, round(length / 8)) if gap else 1
    for k in range(periods):
        ends = [
            (start[0] + (end[0] - start[0]) * f, start[1] + (end[1] - start[1]) * f)
            for f in (k / periods, (k + 1 - gap) / periods)
        ]
        draw.line(ends, fill=colour, width=width)
