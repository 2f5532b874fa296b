"""Cost of a training step, and of the trainer's part of it: kernels, waits and memory, compared with a bare loop.

usage: python -m benchmarks.training_step RECIPE [--set KEY=VALUE ...] [--random-weights] [--steps N] [--profile]
           [--against bare|bare-eager|bare-compiled] [--rounds N] [--json FILE]

``--against bare``: also measure the same model, LoRA and optimizer on fixed inputs without the trainer, eager and (on a
GPU) captured; ``bare-eager``: eager alone; ``bare-compiled``: also compiled. ``--profile``: kernels by kind, and traces
next to the JSON file, which is written after each row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.training_step.command import Asked, step


def main() -> int:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step")
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--random-weights", action="store_true", help="random numbers for base model and images")
    parser.add_argument("--steps", type=int, default=30, help="steps to time, after a warm-up")
    parser.add_argument("--profile", action="store_true", help="also show kernels, and keep traces")
    parser.add_argument("--against", choices=["bare", "bare-eager", "bare-compiled"])
    parser.add_argument("--rounds", type=int, default=2, help="ours and bare in turns, so that drift affects both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = Asked(options.steps, options.random_weights, options.profile, options.against, options.rounds)
    return step(options.recipe, options.overrides, asked, options.json)


if __name__ == "__main__":
    sys.exit(main())
