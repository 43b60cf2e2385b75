"""A small world with exact answers: shapes on a grid, bar charts and line charts, and questions about them."""

from trinity_vlm.environments.microcosm.environment import SPLITS, Microcosm, StyleMix
from trinity_vlm.environments.microcosm.programs import Program, execute, parse, text
from trinity_vlm.environments.microcosm.render import render
from trinity_vlm.environments.microcosm.scenes import (
    ChartScene,
    Mark,
    Scene,
    ShapesScene,
    Thing,
    listing,
    sample_scene,
)
from trinity_vlm.environments.microcosm.style import BASE, EVOLVE_STYLE, SHIFTS, Style, parse_style

__all__ = [
    "BASE",
    "EVOLVE_STYLE",
    "SHIFTS",
    "SPLITS",
    "ChartScene",
    "Mark",
    "Microcosm",
    "Program",
    "Scene",
    "ShapesScene",
    "Style",
    "StyleMix",
    "Thing",
    "execute",
    "listing",
    "parse",
    "parse_style",
    "render",
    "sample_scene",
    "text",
]
