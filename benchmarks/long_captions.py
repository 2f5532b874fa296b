"""Checks whether a concept after 150 tokens of a caption is learned, with 225 tokens read and with 75.

usage: python benchmarks/long_captions.py FOLDER [--steps 300]

The captions of the demo's images, and the prompts, get 150 commas at the front. With 75 tokens all texts are then
the same. Needs no GPU. For each limit it prints the concept score and its control. It also prints the probability that
an image for the concept is closer to the concept's images than an image for a control prompt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image  # noqa: E402

from lora_rocm.train.concept_score import nearer, nearest_distance  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "lora_rocm" / "builtin" / "demo_images"
FILLING = ", " * 150
PROMPTS = (
    "a zibu on a green striped background", "a zibu in the middle on a blue background",
    "a zibu on the left on a yellow background", "a zibu on the right on a white background",
    "a zibu at the top on a gray background",
)  # fmt: skip
CONTROLS = (
    "a large blue square in the middle, on a white background", "a red heart on the right, on a yellow background",
    "a large pink circle in the middle, on a green checkered background",
    "a small green star on the left, on a blue background",
    "a large orange diamond in the middle, on a white background",
)  # fmt: skip


def main() -> None:
    """Train with both limits and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    folder = options.folder.absolute()
    data = folder / "images"
    data.mkdir(parents=True, exist_ok=True)
    for image in IMAGES.glob("*.png"):
        shutil.copy(image, data)
        caption = image.with_suffix(".txt").read_text(encoding="utf-8")
        (data / f"{image.stem}.txt").write_text(FILLING + caption, encoding="utf-8")
    print(f"{'tokens':8}{'score':>8}{'control':>9}{'told apart':>12}")
    for limit in (225, 75):
        run = folder / f"run-{limit}"
        train(run, data, limit, options.steps)
        events = map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
        found = next(event for event in events if event["type"] == "concept")
        print(
            f"{limit:<8}{found['score']:8.2f}{found['control']:9.2f}{told_apart(run, options.steps):12.2f}", flush=True
        )


def train(run: Path, data: Path, limit: int, steps: int) -> None:
    """Train the demo with these captions and this limit."""
    keys = {
        "model.max_token_length": limit,
        "data.path": str(data),
        "train.max_train_steps": steps,
        "sample.every_n_steps": steps,
        "sample.prompts": [FILLING + prompt for prompt in PROMPTS],
        "sample.control_prompts": [FILLING + prompt for prompt in CONTROLS],
        "output.formats": ["kohya"],
        "cache.dir": str(run.parent / "cache"),
    }
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "lora_rocm", "train", "recipes/demo.yaml", "--run-dir", str(run)]
    with (run.parent / f"{run.name}.log").open("w", encoding="utf-8") as log:
        subprocess.run([*command, *overrides], cwd=ROOT, stdout=log, stderr=log, check=True)


def told_apart(run: Path, steps: int) -> float:
    """Share of images for the concept that are closer to the concept's images than one for a control prompt."""
    files = sorted((run / "samples" / f"step-{steps:08}").glob("*.png"))
    distances = nearest_distance(*([Image.open(path) for path in paths] for paths in (files, IMAGES.glob("zibu*.png"))))
    return nearer(distances[: len(PROMPTS)], distances[len(PROMPTS) :])


if __name__ == "__main__":
    main()
