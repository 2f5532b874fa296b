"""Recipes that fit into cards of some sizes: the real command at full size, with encoders, under an allocator cap.

usage: python benchmarks/card_sizes.py ROOT FAMILY [--quantization none] [--cards 24,16,12,8] [--steps 14] [--toy]
                                       [--only steps] [--limit-s SECONDS] [--json FILE]

Writes a base with random bf16 weights in the family's published structure (ROOT/FAMILY; FLUX.1 32 GiB, Z-Image 19,
Anima 6), and four images of 1024x1024. Then it runs ``lora-rocm train`` at batch 1 and rank 16 on attention in a child
for each row, from empty caches to the exported file. A row starts when the steps of the one before have ended. The
first row has no cap, recomputes all activations and makes 30 steps; the others are compared with its step. The
cap of a card is its size less 0.75 GiB for desktop and runtime. ``--limit-s``: rows that would probably end later are
skipped. ``--toy``: a tiny base on the CPU, without caps.

``--only steps`` is quicker: steps alone, in one process, with weights that are generated in memory; each row
offloads more of them. It also reports the memory that the allocator holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks share helpers with each other and with tests

from benchmarks.full_size_sdxl import make_images, make_model  # noqa: E402
from benchmarks.memory_plan import Setup, limited_steps  # noqa: E402
from benchmarks.reliable_memory import LAUNCH, figures  # noqa: E402
from lora_rocm.base_models.loading import ModelLayout  # noqa: E402
from lora_rocm.device.allocator import empty_pools  # noqa: E402
from lora_rocm.families.base import family_for  # noqa: E402
from lora_rocm.memory.footprint import measured_rates  # noqa: E402
from lora_rocm.planning.step_choice import choose  # noqa: E402
from lora_rocm.planning.step_plan import Rates, StepRequirements  # noqa: E402
from lora_rocm.recipe.kinds import recipe_from  # noqa: E402
from tests.tiny_anima import write_tiny_anima  # noqa: E402
from tests.tiny_flux import write_tiny_flux  # noqa: E402
from tests.tiny_z_image import write_tiny_z_image  # noqa: E402

GIB = 2**30
DESKTOP_BYTES = 3 * GIB // 4
IMAGES, WARM_UP, TIMED, FIRST_STEPS = 4, 6, 6, 30
TINY = {"anima": write_tiny_anima, "flux": write_tiny_flux, "z-image": write_tiny_z_image}
KEPT = ("weights.jsonl", "footprints.json")
"""Files of the cache folder that later rows get: digests of the base, counted steps."""


def make_base(folder: Path, family: str, toy: bool) -> None:
    """Write the base, unless it is there."""
    if (folder / "model_index.json").exists():
        return
    model = {"family": family, "name_or_path": "random:"}
    recipe = recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}})
    layout: ModelLayout = family_for(recipe).layout  # type: ignore[attr-defined]
    if toy:
        layout = replace(layout, configs=TINY[family](folder.with_name(f"tiny-{family}")), tokenizers={})
    make_model(folder, layout, torch.bfloat16)


def write_recipe(path: Path, options: argparse.Namespace, card_gib: float, cache: Path) -> None:
    """Write the recipe of a row."""
    memory, steps = ("auto", options.steps) if card_gib else ("recompute", max(options.steps, FIRST_STEPS))
    root, side_px = options.root, 64 if options.toy else 1024
    device = ", device: cpu, threads: 2" if options.toy else ""
    model = f"family: {options.family}, name_or_path: '{root / options.family}', quantization: {options.quantization}"
    path.write_text(
        f"model: {{{model}}}\n"
        f"data: {{path: '{root / 'images'}', resolution: {side_px}, bucket_step: 16, enable_bucket: false}}\n"
        "lora: {rank: 16, targets: attention}\n"
        f"train: {{max_train_steps: {steps}, batch_size: 1, seed: 1}}\n"
        f"runtime: {{memory: {memory}{device}}}\n"
        f"cache: {{dir: '{cache}'}}\noutput: {{save_every_n_steps: {steps}}}\n",
        encoding="utf-8",
    )


def run(options: argparse.Namespace, card_gib: float, trained: threading.Event) -> dict[str, Any]:
    """Run one row (0: no cap, everything recomputed) and return its figures; ``trained`` is set after its steps."""
    root, name = options.root, f"{options.family}-{options.quantization}-{card_gib:g}"
    cache, run_dir, home = (root / f"{kind}-{name}" for kind in ("cache", "run", "home"))
    for folder in (cache, run_dir, home):
        shutil.rmtree(folder, ignore_errors=True)
    # The other rows reuse the first row's facts about machine and base, but not its encoded samples.
    cache.mkdir(parents=True)
    home.mkdir()
    for kept in kept_in(options).glob("*"):
        shutil.copytree(kept, home, dirs_exist_ok=True) if kept.name == "home" else shutil.copy(kept, cache)
    recipe = root / f"{name}.yaml"
    write_recipe(recipe, options, card_gib, cache)
    cap_bytes = int(card_gib * GIB) - DESKTOP_BYTES if card_gib and not options.toy else 0
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "LORA_ROCM_HOME": str(home), "PYTHONPATH": paths}
    started = time.perf_counter()
    command = [sys.executable, "-c", LAUNCH, str(recipe), str(run_dir), str(cap_bytes), ""]
    child = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL)
    host_bytes = 0
    while child.poll() is None:
        host_bytes = max(host_bytes, resident_bytes(child.pid))
        time.sleep(0.1)
        if not trained.is_set() and any((run_dir / "checkpoints").glob("step-*")):
            if not card_gib:
                keep(kept_in(options), home, cache)
            trained.set()
    wall_s = time.perf_counter() - started
    trained.set()
    shutil.rmtree(cache, ignore_errors=True)
    return {
        "family": options.family,
        "quantization": options.quantization,
        "card_GiB": card_gib,
        "cap_GiB": cap_bytes / GIB,
        "exit_code": child.returncode,
        "wall_s": round(wall_s, 1),
        "host_peak_GiB": host_bytes / GIB,
        **phases(run_dir),
        **figures(run_dir, 1),
    }


def kept_in(options: argparse.Namespace) -> Path:
    """Return the folder for the facts that the first row learns."""
    folder: Path = options.root / f"kept-{options.family}-{options.quantization}"
    return folder


def keep(folder: Path, home: Path, cache: Path) -> None:
    """Keep for later rows what a row learned of machine and base."""
    shutil.copytree(home, folder / "home", dirs_exist_ok=True)
    for kept in KEPT:
        if (cache / kept).exists():
            shutil.copy(cache / kept, folder)


def resident_bytes(pid: int) -> int:
    """Return the main memory of a process and its children now, pinned memory included; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    return 0


def phases(run_dir: Path) -> dict[str, Any]:
    """Return seconds of each phase, and of a step after the warm-up."""
    path = run_dir / "events.jsonl"
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    ended = {e["phase"]: round(e["seconds"], 1) for e in events if e["type"] == "phase" and e["state"] == "end"}
    steps_s = [event["step_s"] for event in events if event["type"] == "step"][WARM_UP:]
    return {"phases_s": ended, "step_s": statistics.median(steps_s) if steps_s else None}


def line_of(row: dict[str, Any], reference_s: float | None) -> str:
    """Return a row as text."""
    card = f"{row['card_GiB']:g} GB (cap {row['cap_GiB']:.2f} GiB)" if row["card_GiB"] else "no cap, recompute"
    step = f"{1e3 * row['step_s']:.0f} ms" if row["step_s"] else "no step"
    ratio = f" ({row['step_s'] / reference_s:.2f} x)" if row["step_s"] and reference_s else ""
    peak = f"peak {row['peak_memory_GiB']:.2f} GiB, host {row['host_peak_GiB']:.1f} GiB"
    said = "".join(f"\n    {text}" for text in [*row["notices"], *row["changes"], *row["seen"], *row["errors"]])
    times = f"{row['phases_s']}, {row['wall_s']} s"
    return f"{row['family']} {row['quantization']}, {card}: {step}{ratio}, {peak}, {times}{said}"


def steps_alone(options: argparse.Namespace) -> int:
    """Run steps of the plan for each card, the largest first; return 0 if all fitted."""
    base = options.root / options.family if options.toy else options.family
    model = {"family": options.family, "name_or_path": f"random:{base}", "quantization": options.quantization}
    on_gpu, side_px = not options.toy, 64 if options.toy else 1024
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    whole_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else 1 << 62
    rates = measured_rates(device, torch.bfloat16) if on_gpu else Rates()
    setup, job, rows = (
        Setup(model, options.toy, options.root, 16, device),
        StepRequirements(graphs=on_gpu),
        list[dict[str, Any]](),
    )
    for card_gib in (0.0, *sorted(map(float, options.cards.split(",")), reverse=True)):
        cap_bytes = int(card_gib * GIB) - DESKTOP_BYTES if card_gib else whole_bytes
        wanted = job if card_gib else replace(job, modes=("recompute",))
        plan = choose(cap_bytes, setup.footprint(side_px), wanted, rates)
        row: dict[str, Any] = {"card_GiB": card_gib, "cap_GiB": cap_bytes / GIB}
        if plan is None:
            row["problem"] = "no plan fits"
        else:
            row |= limited_steps(setup, cap_bytes, plan, side_px, anew=False, timed=TIMED)
            setup.optimizer.drop_gradients()
            empty_pools()
        if "step_s" in row and rows:
            row["ratio"] = row["step_s"] / rows[0]["step_s"]
        rows.append(row)
        sizes = {name: round(size / GIB, 2) for name, size in row.items() if name.endswith("_bytes")}
        print(json.dumps({**row, **sizes}), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(any("step_s" not in row for row in rows))


def show(options: argparse.Namespace, running: Sequence[Future[dict[str, Any]]], rows: list[dict[str, Any]]) -> None:
    """Print the rows that have ended, and write all so far."""
    while len(rows) < len(running) and running[len(rows)].done():
        rows.append(running[len(rows)].result())
        print(line_of(rows[-1], rows[0]["step_s"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main() -> int:
    """Make the inputs, run the rows, print; return 0 if all finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("family", choices=sorted(TINY))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--cards", default="24,16,12,8")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", choices=["steps"])
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.root = options.root.resolve()
    started = time.perf_counter()
    if options.only:
        if options.toy:
            make_base(options.root / options.family, options.family, True)
        return steps_alone(options)
    make_images(options.root / "images", 64 if options.toy else 1024, IMAGES, square=True)
    make_base(options.root / options.family, options.family, options.toy)
    print(f"base written after {time.perf_counter() - started:.0f} s", flush=True)
    running, rows = list[Future[dict[str, Any]]](), list[dict[str, Any]]()
    with ThreadPoolExecutor() as pool:
        for card_gib in (0.0, *map(float, options.cards.split(","))):
            longest_s = max((row["wall_s"] for row in rows), default=0.0)
            if time.perf_counter() - started + longest_s > options.limit_s:
                print(f"{card_gib:g} GB: skipped, no time is left", flush=True)
                continue
            trained = threading.Event()
            running.append(pool.submit(run, options, card_gib, trained))
            trained.wait()
            show(options, running, rows)
    show(options, running, rows)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}")
    return int(any(not row["finished"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
