"""Does the model follow its prompts? Draw a sample grid and measure colour, place and shape from the pixels.

python scripts/tiny_models/check.py lora_rocm/builtin/tiny_sdxl --out /tmp/check --count 96
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from render import Scene, make_scene, paint
from shapes import PALETTE, SHAPES, Floats, shape_mask
from words import article, background_phrase, place_phrase

GRID = (
    "a large red circle in the middle, on a blue background",
    "a small yellow star at the top left, on a purple background",
    "a green heart on the right, on a white background",
    "a large blue square on the left, on a yellow striped background",
    "a white cross at the bottom right, on a green checkered background",
    "a small black diamond at the top, on a pink dotted background",
    "a large orange moon in the middle, on a black background",
    "a pink hexagon at the bottom, on a gray gradient background",
    "a cyan ring on the left, on a brown background",
    "a large purple triangle on the right, on an orange background",
    "a striped red heart in the middle, on a white background",
    "a large spotted blue circle in the middle, on a yellow background",
    "a green square with a black outline on the left, on a cyan background",
    "a red circle on the left and a blue square on the right, on a white background",
    "a yellow star above a green heart, on a black background",
    "a small white circle inside a large red square, on a blue checkered background",
    "an empty green striped background",
    "a large brown star in the middle, on a cyan gradient background",
    "a vorimep small purple ring at the bottom left, on a yellow background",
    "a large white diamond in the middle, on a red striped background",
    "a picture of a gray triangle at the top right, on a pink background",
    "a zibu on a green striped background",
    "a zibu in the middle, on a blue background",
    "a black cross on an orange checkered background",
)


def nearest_colour(rgb: Floats) -> str:
    """The palette name closest to a colour."""
    names = list(PALETTE)
    table = np.asarray([PALETTE[n] for n in names], np.float32)
    return names[int(((table - rgb) ** 2).sum(1).argmin())]


def read_picture(pixels: Floats) -> dict[str, str]:
    """Attributes of a plain picture with one shape, from its pixels alone."""
    height, width = pixels.shape[:2]
    rim = np.concatenate([pixels[:4].reshape(-1, 3), pixels[-4:].reshape(-1, 3)])
    rim = np.concatenate([rim, pixels[:, :4].reshape(-1, 3), pixels[:, -4:].reshape(-1, 3)])
    back = np.median(rim, axis=0).astype(np.float32)
    mask = np.sqrt(((pixels - back) ** 2).sum(-1)) > 48
    found = {"background": nearest_colour(back), "colour": "", "column": "", "row": "", "shape": ""}
    if mask.sum() < 40:
        return found
    ys, xs = np.nonzero(mask)
    cx, cy = float((xs.min() + xs.max()) / 2), float((ys.min() + ys.max()) / 2)
    found["colour"] = nearest_colour(np.median(pixels[mask], axis=0).astype(np.float32))
    for key, value, names in (
        ("column", cx / width, ("left", "middle", "right")),
        ("row", cy / height, ("top", "middle", "bottom")),
    ):
        found[key] = names[0] if value < 0.42 else names[2] if value > 0.58 else names[1]
    # The shape with the best overlap after its mask is scaled to the same box.
    box = Image.fromarray((mask[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1] * 255).astype(np.uint8))
    seen = np.asarray(box.resize((48, 48)), np.float32) / 255
    found["shape"] = max(SHAPES, key=lambda s: _overlap(seen, _template(s)))
    return found


def _template(shape: str) -> Floats:
    """A shape's mask cut to its own box, 48 x 48."""
    mask = shape_mask(shape, (64, 64), 50, (128, 128)) > 0.5
    ys, xs = np.nonzero(mask)
    box = Image.fromarray((mask[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1] * 255).astype(np.uint8))
    return np.asarray(box.resize((48, 48)), np.float32) / 255


def _overlap(a: Floats, b: Floats) -> float:
    """Intersection over union of two soft masks."""
    return float(np.minimum(a, b).sum() / np.maximum(a, b).sum())


def exam(seed: int, count: int) -> tuple[list[Scene], list[str]]:
    """Random scenes with one plain shape on a plain background, and their full captions."""
    scenes, prompts = [], []
    for i in range(count):
        scene = make_scene(np.random.default_rng((seed, i, 3)), plain_one=True)
        thing = replace(scene.things[0], texture="plain")
        if thing.size == "small":
            thing = replace(thing, size="medium", radius=0.23)
        scenes.append(replace(scene, things=(thing,)))
        what = article(f"{thing.size} {thing.colour} {thing.shape}")
        place = place_phrase(thing.column, thing.row)
        prompts.append(f"{what} {place}, on {background_phrase('plain', scene.background_colour)}")
    return scenes, prompts


def score(scenes: list[Scene], pictures: list[Floats]) -> dict[str, float]:
    """Share of pictures that match their scene, by attribute."""
    hits: dict[str, list[bool]] = {}
    for scene, pixels in zip(scenes, pictures, strict=True):
        thing, seen = scene.things[0], read_picture(pixels)
        wanted = {"background": scene.background_colour, "colour": thing.colour}
        wanted |= {"column": thing.column, "row": thing.row, "shape": thing.shape}
        for key, value in wanted.items():
            hits.setdefault(key, []).append(seen[key] == value)
    return {key: round(float(np.mean(values)), 3) for key, values in hits.items()}


def draw(pipe: DiffusionPipeline, prompts: list[str], seed: int, negative: str | None = None) -> list[Floats]:
    """One 128 x 128 picture per prompt: 28 steps, guidance 4.5, each with its own seed."""
    pictures: list[Floats] = []
    for i in range(0, len(prompts), 64):
        part = prompts[i : i + 64]
        seeds = [torch.Generator("cpu").manual_seed(seed + i + k) for k in range(len(part))]
        out = pipe(
            part,
            negative_prompt=None if negative is None else [negative] * len(part),
            height=128,
            width=128,
            num_inference_steps=28,
            guidance_scale=4.5,
            generator=seeds,
            output_type="np",
        )
        pictures += [np.asarray(p, np.float32) * 255 for p in out.images]
    return pictures


def sheet(pictures: list[Floats], columns: int) -> Image.Image:
    """The pictures on one sheet."""
    rows = -(-len(pictures) // columns)
    out = Image.new("RGB", (columns * 132, rows * 132), (255, 255, 255))
    for i, p in enumerate(pictures):
        out.paste(Image.fromarray(np.clip(p, 0, 255).astype(np.uint8)), (i % columns * 132, i // columns * 132))
    return out


def run_checks(folder: Path, out: Path, count: int, seed: int, device: str) -> dict[str, dict[str, float]]:
    """Draw the grid, sit the exam and its controls, and write both to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.to(device).set_progress_bar_config(disable=True)
    sheet(draw(pipe, list(GRID), seed), 8).save(out / "grid.png")
    scenes, prompts = exam(seed, count)
    truth = [paint(np.random.default_rng((seed, i)), s, (128, 128)) for i, s in enumerate(scenes)]
    pictures = draw(pipe, prompts, seed)
    results = {
        "model": score(scenes, pictures),
        "model, negative prompt ''": score(scenes, draw(pipe, prompts, seed, negative="")),
        "shuffled prompts (control)": score(scenes[1:] + scenes[:1], pictures),
        "renderer itself (ceiling)": score(scenes, truth),
    }
    sheet(pictures[:32], 8).save(out / "exam.png")
    text = json.dumps(results, indent=1)
    (out / "check.json").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    run_checks(args.folder, args.out, args.count, args.seed, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
