"""How long a user waits before anything happens: ``--help``, and ``check`` of many pictures.

python benchmarks/startup.py [--pictures 1000] [--rounds 5]

Prints medians of wall-clock seconds of whole processes. The first check also weighs the base model in a child; later
ones remember that.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

SIZES = [(1024, 1024), (1200, 800), (800, 1200), (1600, 900), (900, 1600), (2048, 1536)]
RECIPE = """\
model: {{name_or_path: "builtin:tiny-sdxl"}}
data: {{path: '{pictures}', resolution: 1024, shuffle_caption: true}}
train: {{max_train_steps: 1000}}
cache: {{dir: '{cache}'}}
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    show("lora-rocm --help", [seconds_of("--help") for _ in range(options.rounds)], limit_s=0.3)
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_dataset(Path(folder), options.pictures)
        show("lora-rocm check, first time (weighs the model)", [seconds_of("check", str(recipe))], limit_s=None)
        times = [seconds_of("check", str(recipe)) for _ in range(options.rounds)]
        show(f"lora-rocm check, {options.pictures} pictures", times, limit_s=3.0)


def write_dataset(folder: Path, num_pictures: int) -> Path:
    """Pictures of a few shapes as JPEG, each with ten tags; returns the recipe."""
    pictures = folder / "pictures"
    pictures.mkdir()
    for index, size in enumerate(SIZES):
        Image.effect_noise(size, 60).convert("RGB").save(folder / f"{index}.jpg", quality=80)
    contents = [(folder / f"{index}.jpg").read_bytes() for index in range(len(SIZES))]
    for number in range(num_pictures):
        # a comment behind the end-of-image marker: the same pixels in a file of its own content and size
        extra = f"picture {number}".encode("ascii") + b"." * number
        (pictures / f"{number:05d}.jpg").write_bytes(contents[number % len(SIZES)] + extra)
        tags = ", ".join(f"tag{(number * 7 + place) % 500}" for place in range(10))
        (pictures / f"{number:05d}.txt").write_text(tags, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(pictures=pictures, cache=folder / "cache"), encoding="utf-8")
    return recipe


def seconds_of(*arguments: str) -> float:
    """Wall-clock seconds of one command."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "lora_rocm", *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return seconds


def show(name: str, times: list[float], limit_s: float | None) -> None:
    """Print a median with its range and the limit that it is held to."""
    limit = f" (limit {limit_s:g} s)" if limit_s is not None else ""
    print(f"{name}: median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f}{limit}")


if __name__ == "__main__":
    main()
