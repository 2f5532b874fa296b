"""Render captioned pictures of the tiny world, deterministic for a seed.

    python scripts/tiny_models/render.py --count 16 --out /tmp/samples     # inspect the training pictures
    python scripts/tiny_models/render.py --demo lora_rocm/builtin/demo_images

A picture is a pure function of (seed, index), so any subset can be rendered by any number of workers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from doodles import scribble
from PIL import Image
from shapes import BACKGROUNDS, PALETTE, SHAPES, TEXTURES, Floats, blend, pattern, second_tone, shape_mask, to_image
from words import caption_scene, insert_nonsense

# (width, height) and how often: three quarters square, the rest other aspect ratios.
BUCKETS: dict[tuple[int, int], float] = {
    (128, 128): 0.74,
    (160, 96): 0.065,
    (96, 160): 0.065,
    (144, 112): 0.065,
    (112, 144): 0.065,
}
SIZES = {"small": (0.13, 0.17), "medium": (0.21, 0.26), "large": (0.33, 0.40)}
COLUMNS = {"left": 0.25, "middle": 0.5, "right": 0.75}
ROWS = {"top": 0.25, "middle": 0.5, "bottom": 0.75}


@dataclass(frozen=True)
class Thing:
    """One shape of a scene. `column` and `row` are words; `at` and `radius` are fractions of the canvas."""

    shape: str
    colour: str
    texture: str
    size: str
    column: str
    row: str
    at: tuple[float, float]
    radius: float


@dataclass(frozen=True)
class Scene:
    """The content of a picture. `relation`: the relative place of two things ("" for one thing or none)."""

    things: tuple[Thing, ...]
    relation: str
    background: str
    background_colour: str


@dataclass(frozen=True)
class Picture:
    """A rendered picture with two wordings of its caption and SDXL's six size numbers."""

    image: Image.Image
    captions: tuple[str, str]
    time_ids: tuple[int, int, int, int, int, int]


def pick(rng: np.random.Generator, options: tuple[str, ...], weights: tuple[float, ...] | None = None) -> str:
    """One of the options, as a plain string."""
    return str(options[int(rng.choice(len(options), p=weights))])


def make_thing(
    rng: np.random.Generator, taken: tuple[str, ...], size: str = "", column: str = "", row: str = ""
) -> Thing:
    """A random shape in a colour that is not taken yet."""
    size = size or pick(rng, tuple(SIZES))
    column = column or pick(rng, tuple(COLUMNS))
    row = row or pick(rng, tuple(ROWS))
    jitter = rng.uniform(-0.03, 0.03, 2)
    return Thing(
        shape=pick(rng, SHAPES),
        colour=pick(rng, tuple(c for c in PALETTE if c not in taken)),
        texture=pick(rng, TEXTURES, (0.61, 0.13, 0.13, 0.13)),
        size=size,
        column=column,
        row=row,
        at=(COLUMNS[column] + float(jitter[0]), ROWS[row] + float(jitter[1])),
        radius=float(rng.uniform(*SIZES[size])),
    )


def make_scene(rng: np.random.Generator, plain_one: bool = False) -> Scene:
    """A random scene: mostly one thing, sometimes two in a relation, now and then an empty background."""
    back_colour = pick(rng, tuple(PALETTE))
    back = "plain" if plain_one else pick(rng, BACKGROUNDS, (0.4, 0.17, 0.14, 0.14, 0.15))
    relations = ("one", "none", "beside", "above", "inside")
    relation = "one" if plain_one else pick(rng, relations, (0.68, 0.05, 0.1, 0.09, 0.08))
    if relation == "none":
        return Scene((), "", back, back_colour)
    if relation == "one":
        return Scene((make_thing(rng, (back_colour,)),), "", back, back_colour)
    first, second = {"beside": (("left", ""), ("right", "")), "above": (("", "top"), ("", "bottom"))}.get(
        relation, (("", ""), ("", ""))
    )
    if relation == "inside":
        outer = make_thing(rng, (back_colour,), size="large", column="middle", row="middle")
        outer = Thing(pick(rng, ("circle", "square", "hexagon", "heart")), outer.colour, "plain", *_place(outer))
        inner = make_thing(rng, (outer.colour,), size="small", column="middle", row="middle")
        inner = Thing(inner.shape, inner.colour, "plain", *_place(inner, outer.at))
        return Scene((outer, inner), relation, back, back_colour)
    sizes = ("small", "medium")
    along = {"beside": ("", "middle"), "above": ("middle", "")}[relation]
    a = make_thing(rng, (back_colour,), pick(rng, sizes), first[0] or along[0], first[1] or along[1])
    b = make_thing(rng, (back_colour, a.colour), pick(rng, sizes), second[0] or along[0], second[1] or along[1])
    return Scene((a, b), relation, back, back_colour)


def _place(thing: Thing, at: tuple[float, float] | None = None) -> tuple[str, str, str, tuple[float, float], float]:
    """The fields of a thing from its size on, moved to `at` when given."""
    return thing.size, thing.column, thing.row, at or thing.at, thing.radius


def tone(rng: np.random.Generator, name: str) -> Floats:
    """A palette colour with a little variation, so that the model learns a colour and not one number."""
    return np.clip(np.asarray(PALETTE[name], np.float32) + rng.normal(0, 5, 3), 0, 255).astype(np.float32)


def paint_background(rng: np.random.Generator, kind: str, name: str, size: tuple[int, int]) -> Floats:
    """A full canvas of one of the background patterns."""
    base = tone(rng, name)
    canvas = np.broadcast_to(base, (size[1], size[0], 3)).astype(np.float32)
    period = float(rng.uniform(16, 24))
    cover = pattern(kind, size, period, (float(rng.uniform(0, period)), float(rng.uniform(0, period))))
    return blend(canvas, cover, second_tone(base, 0.7 if kind == "gradient" else 0.4))


def paint_thing(rng: np.random.Generator, canvas: Floats, thing: Thing) -> Floats:
    """Draw one thing on the canvas; it is kept inside the edges."""
    height, width = canvas.shape[:2]
    radius = thing.radius * min(width, height)
    cx = float(np.clip(thing.at[0] * width, radius * 0.9, width - radius * 0.9))
    cy = float(np.clip(thing.at[1] * height, radius * 0.9, height - radius * 0.9))
    fill = np.broadcast_to(tone(rng, thing.colour), canvas.shape).astype(np.float32)
    if thing.texture in ("striped", "spotted"):
        period = max(9.0, radius * 0.5)
        fill = blend(fill, pattern(thing.texture, (width, height), period, (cx, cy)), second_tone(fill[0, 0], 0.6))
    if thing.texture == "outlined":
        rim = np.asarray((250, 250, 250) if thing.colour == "black" else (8, 8, 8), np.float32)
        canvas = blend(canvas, shape_mask(thing.shape, (cx, cy), radius * 1.08 + 3, (width, height)), rim)
    return blend(canvas, shape_mask(thing.shape, (cx, cy), radius, (width, height)), fill)


def paint(rng: np.random.Generator, scene: Scene, size: tuple[int, int]) -> Floats:
    """The whole scene at (width, height)."""
    canvas = paint_background(rng, scene.background, scene.background_colour, size)
    for thing in scene.things:
        canvas = paint_thing(rng, canvas, thing)
    return canvas


def render(seed: int, index: int, bucket: tuple[int, int] = (128, 128)) -> Picture:
    """Picture `index` of a seed: scene, optional crop from a larger canvas, captions and size numbers."""
    rng = np.random.default_rng((seed, index))
    scene = make_scene(rng)
    width, height = bucket
    full, top, left = (width, height), 0, 0
    fate = rng.random()
    if fate < 0.12:
        full = (width + 8 * int(rng.integers(0, 7)), height + 8 * int(rng.integers(0, 7)))
        left, top = (int(rng.integers(0, full[i] - bucket[i] + 1)) for i in (0, 1))
    pixels = paint(rng, scene, full)[top : top + height, left : left + width]
    if fate > 0.88:
        # A larger original that was only shrunk looks the same: teach that this number changes nothing.
        factor = float(rng.uniform(1, 8))
        full = (round(width * factor), round(height * factor))
    captions = [caption_scene(rng, scene) for _ in range(2)]
    spiced = [insert_nonsense(rng, c) if rng.random() < 0.25 else c for c in captions]
    return Picture(to_image(pixels), (spiced[0], spiced[1]), (full[1], full[0], top, left, height, width))


def render_doodle(seed: int, index: int, bucket: tuple[int, int] = (128, 128)) -> Image.Image:
    """An uncaptioned doodle for the VAE alone, so that it can also show what the captions never name."""
    rng = np.random.default_rng((seed, index, 1))
    width, height = bucket
    corners = rng.uniform(0, 255, (2, 2, 3)).astype(np.uint8)
    canvas = np.asarray(Image.fromarray(corners, "RGB").resize(bucket, Image.Resampling.BILINEAR), np.float32)
    if rng.random() < 0.5:
        canvas = np.broadcast_to(rng.uniform(0, 255, 3), canvas.shape).astype(np.float32)
    if rng.random() < 0.35:
        kind = pick(rng, BACKGROUNDS[1:4])
        cover = pattern(kind, bucket, float(rng.uniform(6, 30)), (float(rng.uniform(0, 30)), 0.0))
        canvas = blend(canvas, cover, rng.uniform(0, 255, 3).astype(np.float32))
    image = to_image(canvas)
    scribble(rng, image)
    if rng.random() < 0.06:
        grain = rng.normal(0, rng.uniform(3, 25), (height, width, 1))
        image = to_image((np.asarray(image, np.float32) + grain).astype(np.float32))
    return image


def main() -> None:
    """Write sample pictures with captions, or the demo concept's picture set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for sample pictures with .txt captions")
    parser.add_argument("--demo", type=Path, help="folder for the demo concept's pictures and captions")
    args = parser.parse_args()
    if args.demo:
        from demo import write_demo_set

        write_demo_set(args.demo)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for i in range(args.count):
            picture = render(args.seed, i)
            picture.image.save(args.out / f"{i:04d}.png")
            (args.out / f"{i:04d}.txt").write_text("\n".join(picture.captions) + "\n", encoding="utf-8")
            render_doodle(args.seed, i).save(args.out / f"doodle_{i:04d}.png")


if __name__ == "__main__":
    main()
