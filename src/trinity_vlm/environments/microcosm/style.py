"""How a scene looks and how crowded it is: one frozen record of continuous knobs, and named shifts that turn them.

A style is written ``shift[-amount][+shift[-amount]...]``, for example ``"palette-0.3+small"``; ``"base"`` turns none.
``amount`` in [0, 1] interpolates linearly between the base value (0) and the shift's full value (1, the default), so
that the difficulty of a distribution can be dialled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from trinity_vlm.errors import ConfigError

EVOLVE_STYLE = "palette-0.6+dark-0.5+small-0.4"
"""The style of the loop's unlabeled images and of their held-out problems: the one place that defines it."""


@dataclass(frozen=True, slots=True)
class Style:
    """Knobs of one distribution of images. Levels and noise are in grey levels (0..255), lengths relative or in pixels.

    palette: blend weight between the two palettes, 0 first, 1 second
    background, background_spread: mean grey level and half-width of its uniform draw
    outline: opacity of a contrasting outline around shapes and marks
    grid: opacity of cell borders (shapes) and horizontal gridlines (charts)
    object_scale: factor on shape radii
    plot_scale: factor on the height of a chart's plot area (the axis shrinks with it)
    bar_width: share of a bar's slot that it fills
    line_width: of line charts, pixels
    line_gap: share of a line chart's line left blank, in dashes
    pixel_noise: half-width of uniform grey noise on every pixel
    colour_jitter: half-width of uniform noise on each object's red, green and blue
    offset: largest displacement of a shape from its cell's centre, pixels
    things_min, things_max, marks_min, marks_max: how many objects a scene, marks a chart holds (rounded)
    """

    palette: float = 0.0
    background: float = 215.0
    background_spread: float = 20.0
    outline: float = 0.0
    grid: float = 0.0
    object_scale: float = 1.0
    plot_scale: float = 1.0
    bar_width: float = 0.62
    line_width: float = 2.0
    line_gap: float = 0.0
    pixel_noise: float = 6.0
    colour_jitter: float = 12.0
    offset: float = 3.0
    things_min: float = 3.0
    things_max: float = 6.0
    marks_min: float = 3.0
    marks_max: float = 5.0


BASE = Style()

SHIFTS: Mapping[str, Mapping[str, float]] = {
    "palette": {"palette": 1.0},
    "dark": {"background": 50.0},
    "small": {"object_scale": 0.62, "plot_scale": 0.7},
    "more": {"things_min": 7.0, "things_max": 9.0, "marks_min": 6.0, "marks_max": 7.0},
    "noise": {"pixel_noise": 80.0},
    "jitter": {"colour_jitter": 50.0},
    "outline": {"outline": 1.0},
    "grid": {"grid": 0.6},
    "thin": {"bar_width": 0.3, "line_width": 1.0},
    "dashed": {"line_gap": 0.5},
    "loose": {"offset": 5.0},
}
"""What each named shift sets at amount 1."""


@lru_cache(maxsize=256)
def parse_style(name: str) -> Style:
    """The style a name stands for; shifts are applied in order. Raises ConfigError for an unknown shift or amount."""
    style = BASE
    for part in name.split("+"):
        shift, dash, amount_text = part.partition("-")
        if shift == "base" and not dash:
            continue
        if shift not in SHIFTS:
            raise ConfigError(f"style {name!r}: unknown shift {shift!r}; known are base, {', '.join(SHIFTS)}")
        style = _turned(style, SHIFTS[shift], _amount(name, amount_text) if dash else 1.0)
    return style


def _turned(style: Style, full: Mapping[str, float], amount: float) -> Style:
    now = asdict(style)
    return replace(style, **{knob: now[knob] + amount * (value - now[knob]) for knob, value in full.items()})


def _amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0.0 <= amount <= 1.0:
        raise ConfigError(f"style {name!r}: amount {text!r} must be a number in [0, 1], for example palette-0.3")
    return amount
