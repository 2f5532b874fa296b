"""Machine-independent counts of a training step, compared with recorded ones to find regressions.

usage: python benchmarks/counts.py [--write]

The tiny model that ships with the package, with random weights, on the CPU: a few seconds. ``--write`` records the
present counts in ``benchmarks/counts.json``; a test compares with that file.
``benchmarks.training_step.op_counts.Counts`` defines each count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.training_step.op_counts import count_step  # noqa: E402
from benchmarks.training_step.setup import open_bench, recipe_for  # noqa: E402
from lora_rocm.hardware.settings import Settings  # noqa: E402
from lora_rocm.recipe.load import load_recipe  # noqa: E402

RECORDED = Path(__file__).parent / "counts.json"
COMMAND = "python benchmarks/counts.py --write"
LIBRARIES = ("torch", "diffusers", "peft")
SMALL = ("data.resolution=64", "train.batch_size=2", "lora.rank=4", "runtime.device=cpu", "runtime.threads=1")
CASES: dict[str, tuple[str, ...]] = {
    "float32": ("train.mixed_precision=no",),
    "bf16": ("train.mixed_precision=bf16",),
    "bf16, activations recomputed, two micro-batches": (
        "train.mixed_precision=bf16",
        "train.gradient_checkpointing=true",
        "train.gradient_accumulation_steps=2",
    ),
}
EXACT = ("flops", "door_bytes")
"""Counts that follow from the recipe alone: fewer is as wrong as more."""
WARM_UP = 1

Counted = Mapping[str, Mapping[str, int]]


def counted(folder: Path, cases: Mapping[str, tuple[str, ...]] = CASES) -> dict[str, dict[str, int]]:
    """Return the counts of the cases. ``folder``: empty, for runs and caches."""
    found = {}
    for number, (case, changes) in enumerate(cases.items()):
        place = folder / str(number)
        place.mkdir()
        recipe = recipe_for(load_recipe("demo.yaml", [*SMALL, *changes]).recipe, True, place)
        with open_bench(recipe, Settings(), place, random_weights=True, watch_parent=False) as bench:
            bench.make_steps(WARM_UP)
            found[case] = count_step(bench)[0].to_json()
    return found


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine the number of operators per step."""
    return {name: version(name).partition("+")[0] for name in LIBRARIES}


def compared(recorded: Counted, found: Counted) -> tuple[list[str], list[str]]:
    """Return (lines on counts that are worse or must be equal and are not, lines on counts that are better)."""
    worse, better = [], []
    for case in sorted(recorded.keys() | found.keys()):
        before, now = recorded.get(case, {}), found.get(case, {})
        for name in sorted(before.keys() | now.keys()):
            old, new = before.get(name), now.get(name)
            line = f"{case}: {name} {_shown(old)} -> {_shown(new)}"
            if old is None or new is None or new > old or (name in EXACT and new != old):
                worse.append(line)
            elif new < old:
                better.append(line)
    return worse, better


def _shown(value: int | None) -> str:
    return "not there" if value is None else f"{value:,}"


def main() -> int:
    """Count, compare, and record if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="record what is counted now")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory(prefix="lora-rocm-", ignore_cleanup_errors=True) as folder:
        found = counted(Path(folder))
    print(json.dumps(found, indent=1))
    if RECORDED.exists():
        recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
        if recorded["versions"] != versions():
            print(f"recorded with {recorded['versions']}, and these are {versions()}")
        for title, lines in zip(("worse:", "better:"), compared(recorded["counts"], found), strict=True):
            print(title, *(lines or ["nothing"]), sep="\n  ")
    if write:
        content = json.dumps({"versions": versions(), "counts": found}, indent=1) + "\n"
        RECORDED.write_text(content, encoding="utf-8", newline="\n")
        print(f"wrote {RECORDED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
