"""Compare what two commits compute, byte by byte, on this machine: losses, tensors, cache entries and order.

    python benchmarks/golden_runs.py OLD [NEW]      # NEW: a commit; without it the working tree

*New runs*: SDXL, Z-Image and a language model are trained from empty caches on the CPU with one thread and one
micro-batch per update. Images have several sizes and chats several lengths. *Resumed runs*: OLD begins a run with
four micro-batches per update; OLD and NEW each resume a copy of it. All bytes have to be equal. No computed bytes are
stored, because another processor computes others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
HOOK = Path(__file__).with_name("golden_hook")
RECIPES = {"sdxl": "demo.yaml", "z-image": "demo-z-image.yaml", "causal-lm": "demo-causal-lm.yaml"}
SIZES = ((128, 128), (160, 96), (96, 160), (192, 96))  # width, height
STEPS, RESUMED_STEPS = 8, 14
COMMON = {
    "runtime.device": "cpu",
    "runtime.threads": "1",
    "runtime.deterministic": "true",
    "train.batch_size": "2",
    "train.mixed_precision": "no",
    "optim.lr_scheduler": "constant",
    "optim.lr_warmup_steps": "0",
    "sample.every_n_steps": "0",
    "sample.prompts": "[]",
    "sample.control_prompts": "[]",
    "output.save_every_n_steps": "4",
    "output.keep_last": "9",
    "output.name": "lora",  # earlier versions name the files so, regardless of this option
}


@dataclass
class Seen:
    """Results of a run: name -> digest or numbers, by kind."""

    losses: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run both commits and print what differs; return 0 if nothing does."""
    parser = argparse.ArgumentParser(prog="golden_runs.py", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", help="default: the working tree")
    parser.add_argument("--only", choices=RECIPES, help="one family alone")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="golden ") as name:
        folder = Path(name)
        trees = {"old": checked_out(options.old, folder / "old tree"), "new": ROOT}
        if options.new:
            trees["new"] = checked_out(options.new, folder / "new tree")
        images = make_images(folder / "images")
        try:
            different = 0
            for family in [options.only] if options.only else RECIPES:
                different += new_runs(family, trees, images, folder)
                different += resumed_runs(family, trees, images, folder)
        finally:
            for tree in trees.values():
                if tree != ROOT:
                    subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(f"different: {different}")
    return 1 if different else 0


def checked_out(commit: str, tree: Path) -> Path:
    """Check a commit out into a separate folder."""
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], cwd=ROOT, check=True)
    return tree


def make_images(folder: Path) -> Path:
    """Write 14 images of four sizes, each with a caption."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(14):
        width, height = SIZES[number % 5 % len(SIZES)]
        pixels_HWC = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels_HWC).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a zibu, number {number}", encoding="utf-8")
    return folder


def new_runs(family: str, trees: Mapping[str, Path], images: Path, folder: Path) -> int:
    """Train from empty caches at both commits; return the number of differences."""
    seen = {}
    for which, tree in trees.items():
        place = folder / f"{family} {which}"
        keys = {"train.gradient_accumulation_steps": "1", "train.max_train_steps": str(STEPS)}
        seen[which] = trained(family, tree, images, place / "run", place / "cache", keys)
    return compared(f"{family}, new", seen)


def resumed_runs(family: str, trees: Mapping[str, Path], images: Path, folder: Path) -> int:
    """Begin a run at the old commit and resume a copy of it at both; return the number of differences."""
    begun, keys = folder / f"{family} begun", {"train.gradient_accumulation_steps": "4"}
    trained(family, trees["old"], images, begun / "run", begun / "cache", keys | {"train.max_train_steps": str(STEPS)})
    seen = {}
    for which, tree in trees.items():
        place = folder / "resumed"  # the same path: recipes and messages may name it
        shutil.copytree(begun, place)
        keys["train.max_train_steps"] = str(RESUMED_STEPS)
        seen[which] = trained(family, tree, images, place / "run", begun / "cache", keys, "--resume", "latest")
        shutil.rmtree(place)
    return compared(f"{family}, begun by the old commit and resumed", seen)


def trained(family: str, tree: Path, images: Path, run: Path, cache: Path, keys: Mapping[str, str], *more: str) -> Seen:
    """Train with the code of a tree, and read what the run computed."""
    run.parent.mkdir(exist_ok=True)
    order = run.parent / "order.jsonl"
    order.unlink(missing_ok=True)
    settings = {**COMMON, "cache.dir": str(cache), **keys}
    if family != "causal-lm":
        settings["data.path"] = str(images)
    command = [sys.executable, "-P", "-m", "lora_rocm", "train", str(tree / "recipes" / RECIPES[family])]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    path = os.pathsep.join(filter(None, (str(HOOK), str(tree), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "GOLDEN_ORDER": str(order)}
    done = subprocess.run(
        [*command, "--run-dir", str(run), *more],
        cwd=run.parent,
        env=environ,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise SystemExit(f"{family} with {tree}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return seen_in(run, cache, order)


def seen_in(run: Path, cache: Path, order: Path) -> Seen:
    """Read the losses, tensors and order of a run, and the entries of its cache."""
    seen = Seen()
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event.get("type") == "step":
            numbers = {name: event[name] for name in ("iteration", "loss", "learning_rate", "grad_norm")}
            seen.losses[str(event["updates"])] = numbers
    for file in sorted(run.rglob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:  # type: ignore[no-untyped-call]
            for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
                tensor = tensors.get_tensor(name)
                digest = hashlib.sha256(tensor.tobytes()).hexdigest()
                seen.tensors[f"{file.relative_to(run)}: {name} {tensor.dtype} {tensor.shape}"] = digest
    for file in sorted(cache.rglob("*.safetensors")):
        seen.entries[str(file.relative_to(cache))] = hashlib.sha256(file.read_bytes()).hexdigest()
    seen.order = [json.loads(line) for line in order.read_text(encoding="utf-8").splitlines()]
    return seen


def compared(title: str, seen: Mapping[str, Seen]) -> int:
    """Print a line for each kind of result; return how many kinds differ or are empty."""
    different = 0
    old, new = vars(seen["old"]), vars(seen["new"])
    for kind in old:
        one, other = old[kind], new[kind]
        if isinstance(one, list):
            one, other = ({str(place): value for place, value in enumerate(each)} for each in (one, other))
        differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        different += bool(differing) or not one
        verdict = "equal" if one and not differing else f"{len(differing)} DIFFER"
        print(f"{title}: {kind}: {len(one)} and {len(other)}, {verdict}")
        for name in differing[:3]:
            print(f"    {name}: {one.get(name)!s:.150} / {other.get(name)!s:.150}")
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
