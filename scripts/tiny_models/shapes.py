"""Drawing primitives of the tiny picture world: palette, shape masks and textures.

Everything is a pure function of its arguments, so a picture is decided by its scene alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Floats = NDArray[np.float32]
Point = tuple[float, float]
RGB = tuple[int, int, int]

PALETTE: dict[str, RGB] = {
    "red": (214, 32, 36),
    "green": (40, 160, 60),
    "blue": (36, 76, 214),
    "yellow": (250, 214, 40),
    "orange": (250, 132, 24),
    "purple": (124, 44, 170),
    "pink": (252, 150, 196),
    "cyan": (60, 206, 226),
    "brown": (120, 74, 36),
    "white": (248, 248, 248),
    "gray": (136, 136, 136),
    "black": (18, 18, 18),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "cross", "ring", "moon", "hexagon")
TEXTURES = ("plain", "striped", "spotted", "outlined")
BACKGROUNDS = ("plain", "striped", "checkered", "dotted", "gradient")
OVERSAMPLE = 3


def regular(n: int, start: float = -90.0, radius: float = 1.0) -> list[Point]:
    """The corners of a regular polygon of `n` sides, its first one at `start` degrees."""
    return [
        (radius * math.cos(math.radians(start + 360 * i / n)), radius * math.sin(math.radians(start + 360 * i / n)))
        for i in range(n)
    ]


def heart() -> list[Point]:
    """The heart curve, scaled into the unit circle."""
    ts = [2 * math.pi * i / 48 for i in range(48)]
    return [
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16 - 0.05,
        )
        for t in ts
    ]


def star() -> list[Point]:
    """A five-pointed star: outer and inner corners in turn."""
    outer, inner = regular(5), regular(5, start=-54.0, radius=0.45)
    return [p for pair in zip(outer, inner, strict=True) for p in pair]


def cross() -> list[Point]:
    """A plus sign with arms a third of its width."""
    a, b = 0.33, 0.95
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]


def outline(shape: str) -> list[tuple[list[Point], bool]]:
    """The polygons of a shape in unit coordinates, each with whether it fills (True) or cuts out (False)."""
    disc = regular(48)
    simple = {
        "circle": disc,
        "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        "triangle": [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
        "diamond": [(0.0, -1.1), (0.75, 0.0), (0.0, 1.1), (-0.75, 0.0)],
        "star": star(),
        "heart": heart(),
        "cross": cross(),
        "hexagon": regular(6, start=0.0),
    }
    if shape == "ring":
        return [(disc, True), ([(0.55 * x, 0.55 * y) for x, y in disc], False)]
    if shape == "moon":
        return [(disc, True), ([(0.85 * x + 0.5, 0.85 * y - 0.15) for x, y in disc], False)]
    return [(simple[shape], True)]


def polygon_mask(parts: list[tuple[list[Point], bool]], size: tuple[int, int]) -> Floats:
    """Antialiased coverage (0..1) of polygons in pixel coordinates on a canvas of (width, height)."""
    width, height = size
    s = OVERSAMPLE
    canvas = Image.new("L", (width * s, height * s), 0)
    draw = ImageDraw.Draw(canvas)
    for points, fills in parts:
        draw.polygon([(x * s, y * s) for x, y in points], fill=255 if fills else 0)
    return np.asarray(canvas.reduce(s), dtype=np.float32) / 255.0


def shape_mask(shape: str, centre: Point, radius: float, size: tuple[int, int]) -> Floats:
    """Antialiased coverage of one named shape."""
    cx, cy = centre
    parts = [([(cx + radius * x, cy + radius * y) for x, y in pts], fills) for pts, fills in outline(shape)]
    return polygon_mask(parts, size)


def second_tone(colour: Floats, strength: float) -> Floats:
    """The partner tone of a pattern: lighter for dark colours, darker for light ones."""
    target = 0.0 if float(colour.mean()) > 150 else 255.0
    return (colour + (target - colour) * strength).astype(np.float32)


def blend(base: Floats, mask: Floats, colour: Floats) -> Floats:
    """Paint `colour` (one colour or a picture) over `base` where the mask covers it."""
    return (base + (colour - base) * mask[..., None]).astype(np.float32)


def soft_step(value: Floats, width: float) -> Floats:
    """0 below zero, 1 above it, with an edge about `width` wide, which antialiases patterns."""
    return np.clip(value / width + 0.5, 0.0, 1.0).astype(np.float32)


def pattern(kind: str, size: tuple[int, int], period: float, phase: Point) -> Floats:
    """Coverage (0..1) of the second tone of a background or fill pattern."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    u, v = (x + phase[0]) / period, (y + phase[1]) / period
    if kind == "striped":
        return soft_step((np.sin(2 * np.pi * (u + v) / 2) * period / np.pi / 2).astype(np.float32), 1.4)
    if kind == "checkered":
        return soft_step((np.sin(np.pi * u) * np.sin(np.pi * v) * period / 3).astype(np.float32), 1.2)
    if kind in ("dotted", "spotted"):
        row = np.floor(v)
        du = u + 0.5 * (row % 2) - np.floor(u + 0.5 * (row % 2)) - 0.5
        dv = v - row - 0.5
        return soft_step(((0.3 - np.sqrt(du**2 + dv**2)) * period).astype(np.float32), 1.2)
    if kind == "gradient":
        return (y / max(1, height - 1)).astype(np.float32)
    return np.zeros((height, width), dtype=np.float32)


def to_image(pixels: Floats) -> Image.Image:
    """Round a float picture (0..255) into an RGB image."""
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8), "RGB")
