"""Drawing primitives shared by both domains: palettes, cached antialiased masks, cached glyphs, pixel noise."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trinity_vlm.environments.microcosm.style import Style

SIDE = 128
Colour = tuple[int, int, int]

PALETTES: tuple[dict[str, Colour], dict[str, Colour]] = (
    {
        "red": (215, 40, 45),
        "green": (45, 155, 60),
        "blue": (45, 80, 215),
        "yellow": (235, 205, 40),
        "purple": (125, 50, 165),
        "orange": (240, 130, 30),
        "pink": (245, 150, 195),
        "cyan": (70, 200, 210),
    },
    {
        "red": (150, 10, 30),
        "green": (125, 225, 90),
        "blue": (95, 160, 250),
        "yellow": (250, 240, 140),
        "purple": (85, 20, 120),
        "orange": (195, 95, 20),
        "pink": (235, 75, 160),
        "cyan": (15, 135, 150),
    },
)


def palette_colour(style: Style, name: str) -> tuple[float, float, float]:
    """The blend of both palettes' entries for one colour name, before jitter."""
    first, second = (palette[name] for palette in PALETTES)
    red, green, blue = (a + style.palette * (b - a) for a, b in zip(first, second, strict=True))
    return red, green, blue


def tinted(style: Style, name: str, tint: np.ndarray) -> Colour:
    """A palette colour moved by ``tint`` (3 numbers in [-1, 1]) times the style's jitter, clipped to 0..255."""
    red, green, blue = (
        min(255, max(0, round(level + style.colour_jitter * float(shift))))
        for level, shift in zip(palette_colour(style, name), tint, strict=True)
    )
    return red, green, blue


def background_level(style: Style, rng: np.random.Generator) -> int:
    """One grey level, uniform around the style's mean."""
    level = style.background + style.background_spread * rng.uniform(-1, 1)
    return int(min(255, max(0, round(level))))


def ink(level: int) -> Colour:
    """Dark text on a light background, light text on a dark one."""
    return (30, 30, 30) if level > 120 else (235, 235, 235)


def faded(colour: Colour, level: int, opacity: float) -> Colour:
    """``colour`` over a grey ``level``."""
    red, green, blue = (round(level + opacity * (c - level)) for c in colour)
    return red, green, blue


def add_noise(image: Image.Image, style: Style, rng: np.random.Generator) -> Image.Image:
    """Uniform grey noise, one draw a pixel."""
    half_width = round(style.pixel_noise)
    noise = rng.integers(-half_width, half_width + 1, (SIDE, SIDE, 1), dtype=np.int16)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


@lru_cache(maxsize=64)
def glyphs(text: str, size: int) -> Image.Image:
    """A cropped antialiased mask of ``text`` in Pillow's built-in font."""
    font = ImageFont.load_default(size=size)
    left, top, right, bottom = (math.floor(v) for v in font.getbbox(text))
    mask = Image.new("L", (right - left + 2, bottom - top + 2), 0)
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, font=font, fill=255)
    return mask.crop(mask.getbbox())


@lru_cache(maxsize=2048)
def shape_mask(shape: str, radius: float) -> Image.Image:
    """An antialiased mask of one shape, odd side length, centred."""
    oversample = 8
    side = 2 * math.ceil(radius * 1.15) + 3
    centre = side * oversample / 2
    mask = Image.new("L", (side * oversample, side * oversample), 0)
    draw = ImageDraw.Draw(mask)
    for polygon in _outlines(shape):
        draw.polygon(
            [(centre + radius * oversample * x, centre + radius * oversample * y) for x, y in polygon], fill=255
        )
    return mask.resize((side, side), Image.Resampling.BOX)


def _outlines(shape: str) -> list[list[tuple[float, float]]]:
    """Polygons of a shape of radius 1 around the origin, y pointing down."""
    if shape == "circle":
        return [[(math.cos(k * math.pi / 24), math.sin(k * math.pi / 24)) for k in range(48)]]
    if shape == "square":
        return [[(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)]]
    if shape == "triangle":
        return [[(0, -1), (1.05, 0.82), (-1.05, 0.82)]]
    if shape == "star":
        radii = [1.15 if k % 2 == 0 else 0.46 for k in range(10)]
        return [[(r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k, r in enumerate(radii)]]
    arm = 0.34
    return [[(-1, -arm), (1, -arm), (1, arm), (-1, arm)], [(-arm, -1), (arm, -1), (arm, 1), (-arm, 1)]]
