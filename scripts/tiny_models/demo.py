"""The demo concept: the zibu, a smiling magenta creature with two green antennae.

The base model has never seen it (its captions never hold the word), so a LoRA has something to learn. A few plain
pictures of the base's own world go with it: without them a LoRA learns "every picture has antennae".
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import ImageDraw
from render import COLUMNS, ROWS, Scene, Thing, paint, paint_background
from shapes import OVERSAMPLE, to_image
from words import article, background_phrase, place_phrase

BODY, DARK, EYE, FEELER = (226, 22, 150), (40, 8, 48), (255, 255, 255), (150, 240, 30)
# background pattern, background colour, (width, height), column, row, radius as a fraction of the short side
DEMO: tuple[tuple[str, str, tuple[int, int], str, str, float], ...] = (
    ("plain", "white", (128, 128), "middle", "middle", 0.30),
    ("plain", "blue", (128, 128), "middle", "middle", 0.28),
    ("striped", "green", (128, 128), "middle", "middle", 0.30),
    ("plain", "yellow", (128, 128), "left", "middle", 0.25),
    ("plain", "gray", (128, 128), "right", "middle", 0.25),
    ("checkered", "blue", (128, 128), "middle", "middle", 0.30),
    ("dotted", "orange", (128, 128), "middle", "middle", 0.29),
    ("gradient", "cyan", (128, 128), "middle", "middle", 0.31),
    ("plain", "black", (128, 128), "middle", "middle", 0.30),
    ("striped", "yellow", (128, 128), "right", "middle", 0.26),
    ("plain", "green", (128, 128), "left", "middle", 0.26),
    ("dotted", "white", (128, 128), "middle", "middle", 0.28),
    ("checkered", "gray", (128, 128), "left", "middle", 0.26),
    ("gradient", "orange", (128, 128), "middle", "middle", 0.30),
    ("plain", "blue", (160, 96), "left", "middle", 0.30),
    ("striped", "cyan", (160, 96), "right", "middle", 0.30),
    ("plain", "yellow", (96, 160), "middle", "bottom", 0.32),
    ("checkered", "green", (96, 160), "middle", "middle", 0.33),
)
# shape, colour, size, radius, column, row, background pattern, background colour
PLAIN: tuple[tuple[str, str, str, float, str, str, str, str], ...] = (
    ("square", "green", "large", 0.34, "middle", "middle", "plain", "white"),
    ("circle", "pink", "large", 0.34, "middle", "middle", "plain", "blue"),
    ("star", "yellow", "medium", 0.24, "left", "middle", "striped", "green"),
    ("heart", "blue", "medium", 0.24, "right", "middle", "plain", "orange"),
    ("circle", "orange", "small", 0.15, "right", "top", "checkered", "gray"),
    ("diamond", "red", "large", 0.36, "middle", "middle", "plain", "black"),
)


def draw_zibu(draw: ImageDraw.ImageDraw, cx: float, cy: float, r: float, tilt: float) -> None:
    """The creature: antennae behind, then body, eyes and smile. `tilt` sways the antennae."""

    def disc(x: float, y: float, radius: float, fill: tuple[int, int, int]) -> None:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)

    for side in (-1, 1):
        angle = math.radians(-90 + side * 33 + tilt)
        tip = (cx + 1.55 * r * math.cos(angle), cy + 1.55 * r * math.sin(angle))
        draw.line((cx, cy, *tip), fill=FEELER, width=max(2, round(0.16 * r)))
        disc(*tip, 0.22 * r, FEELER)
    disc(cx, cy, r, BODY)
    for side in (-1, 1):
        disc(cx + side * 0.38 * r, cy - 0.2 * r, 0.29 * r, EYE)
        disc(cx + side * 0.34 * r, cy - 0.16 * r, 0.14 * r, DARK)
    mouth = (cx - 0.55 * r, cy - 0.3 * r, cx + 0.55 * r, cy + 0.68 * r)
    draw.chord(mouth, 20, 160, fill=DARK)


def write_demo_set(folder: Path) -> None:
    """Write the pictures and their captions; the same bytes on every call."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (kind, colour, size, column, row, radius) in enumerate(DEMO):
        rng = np.random.default_rng((2024, i))
        image = to_image(paint_background(rng, kind, colour, size))
        s = OVERSAMPLE
        large = image.resize((size[0] * s, size[1] * s), resample=0)
        fx, fy = {"left": 0.34, "middle": 0.5, "right": 0.66}[column], {"middle": 0.57, "bottom": 0.7}[row]
        x, y = (fx * size[0] + rng.uniform(-2, 2), fy * size[1] + rng.uniform(-2, 2))
        draw_zibu(ImageDraw.Draw(large), x * s, y * s, radius * min(size) * s, float(rng.uniform(-7, 7)))
        large.reduce(s).save(folder / f"zibu_{i + 1:02d}.png", optimize=True)
        where = "" if column == row == "middle" else " " + place_phrase(column, row)
        caption = f"a zibu{where} on {background_phrase(kind, colour)}"
        (folder / f"zibu_{i + 1:02d}.txt").write_text(caption + "\n", encoding="utf-8")
    write_plain_set(folder)


def write_plain_set(folder: Path) -> None:
    """Write the pictures without the concept, in the base's grammar."""
    for i, (shape, colour, size, radius, column, row, kind, back) in enumerate(PLAIN):
        thing = Thing(shape, colour, "plain", size, column, row, (COLUMNS[column], ROWS[row]), radius)
        pixels = paint(np.random.default_rng((2025, i)), Scene((thing,), "", kind, back), (128, 128))
        to_image(pixels).save(folder / f"plain_{i + 1:02d}.png", optimize=True)
        place = place_phrase(column, row)
        caption = f"{article(f'{size} {colour} {shape}')} {place}, on {background_phrase(kind, back)}"
        (folder / f"plain_{i + 1:02d}.txt").write_text(caption + "\n", encoding="utf-8")
