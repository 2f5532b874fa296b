"""Random scribbles for the VAE: polygons, lines, arcs, blobs and small discs in any colour."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw


def _colour(rng: np.random.Generator) -> tuple[int, int, int]:
    """Any colour, with a bias to the extremes, because eyes and outlines are often black or white."""
    if rng.random() < 0.25:
        level = int(rng.integers(0, 2)) * 240 + 8
        return (level, level, level)
    r, g, b = (int(v) for v in rng.integers(0, 256, 3))
    return (r, g, b)


def _polygon(rng: np.random.Generator, draw: ImageDraw.ImageDraw, at: np.ndarray, reach: float) -> None:
    """A blob (many corners, small wobble) or a jagged polygon."""
    corners = int(rng.integers(3, 14))
    angles = np.sort(rng.uniform(0, 2 * np.pi, corners))
    radii = reach * rng.uniform(0.5, 1.0, corners)
    points = np.stack([at[0] + radii * np.cos(angles), at[1] + radii * np.sin(angles)], 1)
    draw.polygon([(float(x), float(y)) for x, y in points], fill=_colour(rng))


def scribble(rng: np.random.Generator, image: Image.Image) -> None:
    """Draw 3 to 14 random marks, then hand back the picture antialiased, in place."""
    width, height = image.size
    large = image.resize((width * 2, height * 2), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(large)
    for _ in range(int(rng.integers(3, 15))):
        at = rng.uniform(0, 1, 2) * (2 * width, 2 * height)
        reach = float(np.exp(rng.uniform(np.log(7), np.log(90))))
        box = (float(at[0] - reach), float(at[1] - reach), float(at[0] + reach), float(at[1] + reach))
        thickness = int(rng.integers(3, 11))
        kind = int(rng.integers(5))
        if kind == 0:
            _polygon(rng, draw, at, reach)
        elif kind == 1:
            to = rng.uniform(0, 1, 2) * (2 * width, 2 * height)
            draw.line([float(at[0]), float(at[1]), float(to[0]), float(to[1])], fill=_colour(rng), width=thickness)
        elif kind == 2:
            start = float(rng.uniform(0, 360))
            draw.arc(box, start, start + float(rng.uniform(60, 300)), fill=_colour(rng), width=thickness)
        elif kind == 3:
            draw.ellipse(box, fill=_colour(rng))
            inner = reach * float(rng.uniform(0.3, 0.7))
            shift = rng.uniform(-0.3, 0.3, 2) * reach
            x, y = float(at[0] + shift[0]), float(at[1] + shift[1])
            draw.ellipse((x - inner, y - inner, x + inner, y + inner), fill=_colour(rng))
        else:
            draw.rectangle(box, fill=_colour(rng), outline=_colour(rng), width=thickness)
    image.paste(large.reduce(2))
