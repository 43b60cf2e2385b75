"""Pictures show what the scene says: colours, places, sizes, heights; edits stay local."""

from dataclasses import replace

import numpy as np
import pytest

from trinity_vlm.environments.microcosm import BASE, SHIFTS, ChartScene, Microcosm, parse_style, render
from trinity_vlm.environments.microcosm.canvas import SIDE, palette_colour
from trinity_vlm.environments.microcosm.charts import BASELINE_Y, PLOT_HEIGHT, slot_centre, value_y
from trinity_vlm.environments.microcosm.render import RADII, cell_centre
from trinity_vlm.environments.microcosm.vocabulary import CELLS, COLOURS

WORLD = Microcosm()


def scenes(kind, count, style="base"):
    drawn = (WORLD.scene(f"train@{style}", index) for index in range(10 * count))
    return [scene for scene in drawn if isinstance(scene, ChartScene) == (kind != "shapes")][:count]


def colour_map(scene):
    """Per pixel the index of the nearest palette colour, or -1 for background and ink (grey pixels)."""
    pixels = np.asarray(render(scene)).astype(int)
    palette = np.array([palette_colour(scene.style, name) for name in COLOURS])
    nearest = np.linalg.norm(pixels[:, :, None] - palette, axis=-1).argmin(-1)
    grey = pixels.max(-1) - pixels.min(-1) < 40
    return np.where(grey, -1, nearest)


def test_image_is_rgb_and_square():
    """What an image record needs: RGB, 128 x 128."""
    uid, image = WORLD.image("evolve", 0)
    assert uid == "microcosm:evolve/000000"
    assert (image.mode, image.size) == ("RGB", (SIDE, SIDE))


@pytest.mark.parametrize("style", ["base", "palette", "palette-0.5", "dark", "small", "more", "outline"])
def test_each_thing_is_where_it_should_be_in_its_colour(style):
    """An occupied cell's commonest colour (edges blend) is its thing's, centred; other cells are empty."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    for scene in scenes("shapes", 15, style):
        found = colour_map(scene)
        for thing in scene.things:
            x, y = cell_centre(thing.cell)
            near = (abs(rows - y) <= 13) & (abs(columns - x) <= 13) & (found >= 0)
            own = near & (found == COLOURS.index(thing.colour))
            assert near.sum() > 12
            assert COLOURS[np.bincount(found[near]).argmax()] == thing.colour, thing
            assert np.hypot(columns[own].mean() - x, rows[own].mean() - y) < 5.5
        for cell in set(CELLS) - {thing.cell for thing in scene.things}:
            x, y = cell_centre(cell)
            assert (found[y - 9 : y + 9, x - 9 : x + 9] >= 0).sum() <= 4


def test_big_things_are_bigger():
    """For each shape the smallest big one covers more pixels than the largest small one."""
    areas = {}
    for scene in scenes("shapes", 40):
        found = colour_map(scene)
        for thing in scene.things:
            x, y = cell_centre(thing.cell)
            area = (found[max(0, y - 14) : y + 15, max(0, x - 14) : x + 15] == COLOURS.index(thing.colour)).sum()
            areas.setdefault((thing.shape, thing.size), []).append(area)
    for shape in ("circle", "square", "triangle", "star", "cross"):
        assert min(areas[shape, "big"]) > 1.3 * max(areas[shape, "small"])


def test_size_is_absolute_in_every_style():
    """A big shape's radius stays above 7 pixels and a small one's at most 7, so that a lone shape has a size."""
    for shift in SHIFTS:
        scale = parse_style(shift).object_scale
        assert (RADII["big"] - 0.5) * scale > 7
        assert (RADII["small"] + 0.5) * scale <= 7


@pytest.mark.parametrize("style", ["base", "small", "thin", "dark+palette-0.5", "outline+grid"])
def test_marks_stand_at_their_values(style):
    """Bars end and points lie within two pixels of their value's height, each in its own colour."""
    for scene in scenes("charts", 20, style):
        found = colour_map(scene)
        for index, mark in enumerate(scene.marks):
            x = round(slot_centre(scene, index))
            own = np.flatnonzero((found[:BASELINE_Y, x - 2 : x + 3] == COLOURS.index(mark.colour)).sum(1) >= 2)
            assert own.size, (scene, mark)
            height = own.min() if scene.kind == "bar" else own.mean()
            assert abs(height - value_y(scene, mark.value)) <= 2.5


def test_heights_are_proportional_to_values():
    """Twice the value is twice the height, and the axis maximum is the plot's height."""
    scene = scenes("charts", 1)[0]
    assert BASELINE_Y - value_y(scene, scene.axis_max) == pytest.approx(PLOT_HEIGHT)
    assert BASELINE_Y - value_y(scene, scene.axis_max / 4) == pytest.approx(PLOT_HEIGHT / 4)
    assert value_y(scene, 0) == BASELINE_Y


def test_rendering_is_deterministic_and_seeded():
    """The same scene gives the same bytes; another seed gives other jitter and noise."""
    for scene in (*scenes("shapes", 3), *scenes("charts", 3)):
        assert render(scene).tobytes() == render(scene).tobytes()
        assert render(scene).tobytes() != render(replace(scene, seed=scene.seed + 1)).tobytes()


def test_an_edit_changes_only_its_own_pixels():
    """Removing a thing leaves every pixel away from its cell untouched, noise included."""
    for scene in scenes("shapes", 20):
        gone = scene.things[0]
        edited = replace(scene, things=scene.things[1:])
        changed = (np.asarray(render(scene)) != np.asarray(render(edited))).any(-1)
        x, y = cell_centre(gone.cell)
        rows, columns = np.nonzero(changed)
        assert rows.size > 20
        assert max(abs(rows - y).max(), abs(columns - x).max()) <= 18


@pytest.mark.parametrize("shift", sorted(set(SHIFTS) - {"more"}))
def test_every_shift_changes_the_picture(shift):
    """No knob is accepted and ignored: each shift changes shapes or charts, and all but chart-only ones change both."""
    style = parse_style(shift)
    changes = {
        kind: any(render(scene).tobytes() != render(replace(scene, style=style)).tobytes() for scene in scenes(kind, 6))
        for kind in ("shapes", "charts")
    }
    expected = {"thin": (False, True), "dashed": (False, True), "loose": (True, False)}.get(shift, (True, True))
    assert (changes["shapes"], changes["charts"]) == expected


def test_noise_level_is_the_knob():
    """Pixel noise is uniform with the style's half-width."""
    scene = replace(scenes("shapes", 1)[0], things=(), style=replace(BASE, background_spread=0.0, pixel_noise=10.0))
    pixels = np.asarray(render(scene)).astype(int)
    assert (pixels.min(), pixels.max()) == (205, 225)
    assert (pixels[..., 0] == pixels[..., 2]).all()
