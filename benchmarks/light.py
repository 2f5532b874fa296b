"""Times what a user waits for before training: the command line's help, and the check of 1,000 images.

    python benchmarks/light.py [--images 1000] [--json FILE]

Goals on 2 CPU cores: help under 0.3 s, check under 3 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

SIZES = ((4000, 3000), (3000, 4000), (1920, 1080), (1024, 1024), (1500, 2000))
RECIPE = """\
model: {{name_or_path: "builtin:tiny-sdxl"}}
data: {{path: {folder}}}
train: {{max_train_steps: 100}}
"""


def make_images(folder: Path, count: int) -> None:
    """Write ``count`` distinct JPEG files of camera sizes, each with a caption."""
    for number in range(count):
        image = Image.new("RGB", SIZES[number % len(SIZES)], (number % 256, number // 256, 99))
        image.save(folder / f"{number:05d}.jpg", quality=50)
        (folder / f"{number:05d}.txt").write_text(f"image {number}\n", encoding="utf-8")


def seconds(arguments: list[str], repeats: int) -> float:
    """Return the median wall time of a command, each time in a new process.

    Raises:
        SystemExit: the command failed.
    """
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "lora_rocm", *arguments], capture_output=True, encoding="utf-8")
        times.append(time.perf_counter() - begin)
        if done.returncode:
            sys.exit(f"lora-rocm {' '.join(arguments)} failed:\n{done.stderr}")
    return statistics.median(times)


def main() -> None:
    """Measure, print one line per figure, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-rocm-bench-") as name:
        folder = Path(name)
        (folder / "images").mkdir()
        make_images(folder / "images", options.images)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=json.dumps(str(folder / "images"))), encoding="utf-8")
        measured = {
            "help_s": seconds(["--help"], 7),
            "check_recipe_s": seconds(["check", str(recipe), "--schema-only"], 5),
            "check_first_time_s": seconds(["check", str(recipe)], 1),  # weighs the model; cached afterwards
            f"check_{options.images}_images_s": seconds(["check", str(recipe)], 3),
        }
    for what, value in measured.items():
        print(f"{what:28} {value:6.2f}")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
