"""Scene -> 128x128 RGB image, a pure function.

Random numbers belong to cells and slots, so that editing one thing changes no other thing's pixels. In every style a
big shape's radius is above 7 pixels and a small one's at most 7.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from trinity_vlm.environments.microcosm.canvas import (
    SIDE,
    Colour,
    add_noise,
    background_level,
    faded,
    ink,
    shape_mask,
    tinted,
)
from trinity_vlm.environments.microcosm.charts import draw_chart
from trinity_vlm.environments.microcosm.scenes import Scene, ShapesScene, Thing
from trinity_vlm.environments.microcosm.vocabulary import CELLS, COLUMNS

CELL_SIDE = SIDE // len(COLUMNS)
RADII = {"small": 6.5, "big": 12.0}


def render(scene: Scene) -> Image.Image:
    """Draw a scene. Deterministic in the scene, about 1 ms."""
    rng = np.random.default_rng(scene.seed)
    level = background_level(scene.style, rng)
    image = Image.new("RGB", (SIDE, SIDE), (level, level, level))
    draw = _draw_shapes if isinstance(scene, ShapesScene) else draw_chart
    draw(image, scene, level, rng)  # type: ignore[arg-type]
    return add_noise(image, scene.style, rng)


def cell_centre(cell: str) -> tuple[int, int]:
    """(x, y) of a cell's centre in pixels."""
    return COLUMNS.index(cell[0]) * CELL_SIDE + CELL_SIDE // 2, (int(cell[1]) - 1) * CELL_SIDE + CELL_SIDE // 2


def _draw_shapes(image: Image.Image, scene: ShapesScene, level: int, rng: np.random.Generator) -> None:
    style = scene.style
    offsets = rng.uniform(-style.offset, style.offset, (len(CELLS), 2))
    tints = rng.uniform(-1, 1, (len(CELLS), 3))
    wobble = rng.uniform(-0.5, 0.5, len(CELLS))
    if style.grid:
        _draw_grid(image, faded(ink(level), level, style.grid))
    for thing in scene.things:
        slot = CELLS.index(thing.cell)
        radius = (RADII[thing.size] + wobble[slot]) * style.object_scale
        colour = tinted(style, thing.colour, tints[slot])
        edge = faded(ink(level), level, style.outline) if style.outline else None
        _draw_thing(image, thing, offsets[slot], radius, colour, edge)


def _draw_thing(
    image: Image.Image, thing: Thing, offset: np.ndarray, radius: float, colour: Colour, edge: Colour | None
) -> None:
    x, y = cell_centre(thing.cell)
    layers = [(edge, radius + 0.5), (colour, radius - 0.75)] if edge else [(colour, radius)]
    for fill, layer_radius in layers:
        mask = shape_mask(thing.shape, round(layer_radius * 4) / 4)
        corner = (round(x + offset[0]) - mask.width // 2, round(y + offset[1]) - mask.height // 2)
        image.paste(fill, corner, mask)


def _draw_grid(image: Image.Image, colour: Colour) -> None:
    draw = ImageDraw.Draw(image)
    for position in range(CELL_SIDE, SIDE, CELL_SIDE):
        draw.line((position, 0, position, SIDE), fill=colour)
        draw.line((0, position, SIDE, position), fill=colour)
