"""Times ``new`` and ``recipes`` next to ``check --schema-only``, in turn; and ``new`` with images, model and card.

    python benchmarks/new_recipe.py [--rounds 15] [--images 1000]

Goal: a plain ``new`` takes at most 0.3 s longer than ``check --schema-only``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from light import make_images

PLAIN = {
    "check --schema-only": ["check", "sdxl.yaml", "--schema-only"],
    "new": ["new", "{name}.yaml", "--from", "sdxl"],
    "recipes": ["recipes"],
}
FILLED = [
    "new",
    "filled.yaml",
    "--from",
    "sdxl",
    "--images",
    "images",
    "--model",
    "builtin:tiny-sdxl",
    "--card",
    "12GB",
]


def seconds(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Return the wall time of a command, and its processor time (0 on Windows).

    Raises:
        SystemExit: the command failed.
    """
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "lora_rocm", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    wall_s, after = time.perf_counter() - begin, os.times()
    if done.returncode:
        sys.exit(f"lora-rocm {' '.join(arguments)} failed:\n{done.stderr}")
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, used_s


def main() -> None:
    """Measure the commands in turn, so that other work on the machine affects all of them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-rocm-bench-") as name:
        folder = Path(name)
        found = defaultdict[str, list[tuple[float, float]]](list)
        for number in range(options.rounds):
            for what, words in PLAIN.items():
                found[what].append(seconds([word.format(name=number) for word in words], folder))
        print(f"{'command':24} {'wall: best':>10} {'median':>8} {'processor: best':>16} {'median':>8}")
        for what, times in found.items():
            walls, used = zip(*times, strict=True)
            figures = (min(walls), statistics.median(walls), min(used), statistics.median(used))
            print("{:24} {:10.2f} {:8.2f} {:16.2f} {:8.2f}".format(what, *figures))
        (folder / "images").mkdir()
        make_images(folder / "images", options.images)
        wall_s, used_s = seconds(FILLED, folder)
        print(f"new with {options.images} images, model and card: {wall_s:.1f} s ({used_s:.1f} s of a processor)")


if __name__ == "__main__":
    main()
