"""Speed-up by several GPUs, and recovery from a rank killed at a random step, with full-size models, random weights.

usage: python benchmarks/scaling.py ROOT [--family sdxl|flux-bf16|z-image|llama-nf4] [--gpus 2,4] [--batch 4]
                                    [--steps 30] [--kill] [--toy] [--json FILE]

Whole runs of ``lora-rocm train``: the command line, the supervisor, the guard, graphs. First each GPU in a separate
run, all at once; then together. The time per step is the median of the run's own ``step`` events, without the first
ones. ``--kill``: the largest number of GPUs, once undisturbed and once with a rank ended by SIGKILL, both at the same
time and with deterministic kernels; the files must be equal. ``--toy`` rehearses on the CPU, over gloo, with the tiny
model. ``benchmarks.first_start`` writes base, data and recipe of all
families but SDXL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from benchmarks.first_start import FAMILIES, Asked, own_recipe, write_inputs
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events

WARM_UP = 10
IMAGES = 16
PARTS = ("step_s", "loading_s", "copy_s", "check_s", "wait_s")
DEADLINE_S = 400.0
BASES = {True: "builtin:tiny-sdxl", False: "random:stabilityai/stable-diffusion-xl-base-1.0"}

Row = dict[str, Any]


def write_recipe(root: Path, family: str, *, toy: bool) -> Path:
    """Write a recipe with one bucket of square images, without previews and validation samples."""
    if family != "sdxl":
        root.mkdir(parents=True, exist_ok=True)
        asked = Asked(root, family, toy, limit_s=DEADLINE_S)
        write_inputs(asked)
        recipe = own_recipe(asked)
        sections = json.loads(recipe.read_text(encoding="utf-8"))  # json: written by this program
        sections["runtime"] = {"self_test": "no", **({"device": "cpu", "threads": 1} if toy else {})}
        sections["output"] = {"save_every_n_steps": 1000}
        recipe.write_text(json.dumps(sections), encoding="utf-8")
        return recipe
    side_px = 64 if toy else 1024
    images = root / "images"
    images.mkdir(parents=True, exist_ok=True)
    for number in range(IMAGES):
        Image.linear_gradient("L").resize((side_px, side_px)).rotate(20 * number).convert("RGB").save(
            images / f"{number:02}.png"
        )
        (images / f"{number:02}.txt").write_text(f"a zibu, number {number}", encoding="utf-8")
    recipe = root / "scaling.yaml"
    recipe.write_text(
        f"""
model: {{name_or_path: '{BASES[toy]}'}}
data: {{path: '{images}', resolution: {side_px}, bucket_step: 16}}
lora: {{rank: {2 if toy else 16}, targets: attention}}
train: {{max_train_steps: 30, mixed_precision: '{"no" if toy else "bf16"}'}}
runtime: {{device: {"cpu" if toy else "gpu"}, self_test: 'no'{", threads: 1" if toy else ""}}}
cache: {{dir: '{root / "cache"}'}}
output: {{save_every_n_steps: 1000}}
""",
        encoding="utf-8",
    )
    return recipe


def command(recipe: Path, run_dir: Path, gpus: int, settings: dict[str, object]) -> list[str]:
    """Return the command line of one run."""
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [
        sys.executable,
        "-m",
        "lora_rocm",
        "train",
        str(recipe),
        "--run-dir",
        str(run_dir),
        "--gpus",
        str(gpus),
        *sets,
    ]


def start(
    recipe: Path, run_dir: Path, gpus: int, settings: dict[str, object], only: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a run; its output goes into a file next to its directory. only: the one visible GPU."""
    visible = {} if only is None else {"CUDA_VISIBLE_DEVICES": str(only)}
    with run_dir.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            command(recipe, run_dir, gpus, settings),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **visible},
        )


def finish(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Wait for a run to end.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    code = process.wait(DEADLINE_S)
    if code:
        said = run_dir.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{run_dir.name} ended with {code}:\n{said[-3000:]}")


def measure(recipe: Path, root: Path, gpus: int, batch: int, steps: int) -> Row:
    """Run once on several GPUs; return step times after the warm-up."""
    settings: dict[str, object] = {"train.batch_size": batch, "train.max_train_steps": WARM_UP + steps}
    run_dir = root / f"gpus-{gpus}"
    finish(start(recipe, run_dir, gpus, settings), run_dir)
    return times_of(run_dir, gpus, batch)


def measure_alone(recipe: Path, root: Path, gpus: int, batch: int, steps: int) -> list[Row]:
    """Run each GPU separately, all at the same time: speeds without waiting for other ranks."""
    settings: dict[str, object] = {"train.batch_size": batch, "train.max_train_steps": WARM_UP + steps}
    run_dirs = [root / f"alone-{gpu}" for gpu in range(gpus)]
    runs = [start(recipe, run_dir, 1, settings, only=gpu) for gpu, run_dir in enumerate(run_dirs)]
    for process, run_dir in zip(runs, run_dirs, strict=True):
        finish(process, run_dir)
    return [times_of(run_dir, 1, batch) for run_dir in run_dirs]


def times_of(run_dir: Path, gpus: int, batch: int) -> Row:
    """Return figures from the events of a run."""
    events = read_events(RunDir(run_dir).events())
    ranks = [events, *(read_events(RunDir(run_dir).events(rank)) for rank in range(1, gpus))]
    steps_made = [event for event in events if event["type"] == "step"][WARM_UP:]
    seconds = [event["step_s"] for event in steps_made]
    return {
        "gpus": gpus,
        "batch": batch,
        "device": next(event["device"] for event in events if event["type"] == "start"),
        "steps": len(seconds),
        "median_s": statistics.median(seconds),
        "mean_s": statistics.fmean(seconds),
        "p95_s": sorted(seconds)[int(0.95 * len(seconds))],
        "samples_per_s": gpus * batch / statistics.median(seconds),
        "memory_gib": max(event["memory_bytes"] for event in events if event["type"] == "step") / 2**30,
        "ranks": [
            {name: statistics.median(e[name] for e in rank if e["type"] == "step") for name in PARTS} for rank in ranks
        ],
        "said": [event["text"] for event in events if event["type"] in ("notice", "change")],
        "phases": {
            event["phase"]: event["seconds"] for event in events if event["type"] == "phase" and event["state"] == "end"
        },
    }


def kill(recipe: Path, root: Path, gpus: int, batch: int, steps: int, seed: int) -> Row:
    """Run twice at once, killing a rank of the second; return whether it recovered and whether the files are equal."""
    settings: dict[str, object] = {
        "train.batch_size": batch,
        "train.max_train_steps": steps,
        "runtime.deterministic": "true",
        "output.save_every_n_steps": max(steps // 4, 1),
    }
    dice = random.Random(seed)
    rank, at = dice.randrange(gpus), dice.randrange(steps // 4 + 1, steps - 1)
    whole, broken = root / f"whole-{gpus}", root / f"killed-{gpus}"
    undisturbed = start(recipe, whole, gpus, settings)  # concurrent with the other run, so their times are meaningless
    process = start(recipe, broken, gpus, settings)
    updates = _wait_for_step(RunDir(broken), at)
    starts = [event for event in read_events(RunDir(broken).events(rank)) if event["type"] == "start"]
    psutil.Process(starts[-1]["pid"]).kill()
    killed_at = time.time()
    finish(process, broken)
    finish(undisturbed, whole)
    restarts = [event for event in read_events(RunDir(broken).events("supervisor")) if event["type"] == "restart"]
    again = [e["time"] for e in read_events(RunDir(broken).events()) if e["type"] == "step" and e["time"] > killed_at]
    files = [path.relative_to(whole) for path in whole.rglob("*.safetensors")]
    return {
        "gpus": gpus,
        "rank": rank,
        "after_step": updates,
        "restarts": len(restarts),
        "from_step": restarts[0]["from_updates"] if restarts else None,
        "seconds_until_next_step": min(again) - killed_at if again else None,
        "files": len(files),
        "equal": all((whole / name).read_bytes() == (broken / name).read_bytes() for name in files),
    }


def _wait_for_step(run_dir: RunDir, at: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        done = [event["updates"] for event in read_events(run_dir.events()) if event["type"] == "step"]
        if done and done[-1] >= at:
            return int(done[-1])
        time.sleep(0.01)
    raise RuntimeError(f"{run_dir.path.name} made no step {at}")


def tell(row: Row) -> None:
    """Print one line of results."""
    scaling = f", {row['scaling']:.1%} of {row['gpus']} times the first" if "scaling" in row else " alone"
    scaling += f", {row['of_sum']:.1%} of the sum of all alone" if "of_sum" in row else ""
    print(  # noqa: T201
        f"{row['gpus']} x {row['device']}{scaling}: batch {row['batch']} each, {1000 * row['median_s']:.1f} ms/step "
        f"(p95 {1000 * row['p95_s']:.1f}), {row['samples_per_s']:.2f} samples/s, {row['memory_gib']:.1f} GiB; "
        f"{row['ranks']} {row['said']} {row['phases']}",
        flush=True,
    )


def main() -> int:
    """Measure and print; exit code 0 if the killed run gave the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("root", type=Path)
    parser.add_argument("--family", default="sdxl", choices=tuple(FAMILIES))
    parser.add_argument("--gpus", default="2", help="numbers of GPUs, with commas between")
    parser.add_argument("--batch", type=int, default=4, help="samples of one forward pass on each GPU")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--kill-steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    root = options.root.absolute()
    recipe = write_recipe(root, options.family, toy=options.toy)
    counts = [int(word) for word in options.gpus.split(",") if word]
    # each GPU alone
    alone = measure_alone(recipe, root, max(counts), options.batch, options.steps)
    for row in alone:
        tell(row)
    # several GPUs together
    rows, killed = [], None
    for gpus in counts:
        row = measure(recipe, root, gpus, options.batch, options.steps)
        row["scaling"] = row["samples_per_s"] / (gpus * alone[0]["samples_per_s"])
        row["of_sum"] = row["samples_per_s"] / sum(each["samples_per_s"] for each in alone[:gpus])
        rows.append(row)
        tell(row)
    # recovery from a killed rank
    if options.kill:
        killed = kill(recipe, root, max(counts), options.batch, options.kill_steps, options.seed)
        print(f"killed: {killed}", flush=True)  # noqa: T201
    if options.json:
        about = {
            "python": sys.version.split()[0],
            "cpus": os.cpu_count(),
            "alone": alone,
            "scaling": rows,
            "killed": killed,
        }
        options.json.write_text(json.dumps(about, indent=1), encoding="utf-8")
    return 0 if killed is None or (killed["equal"] and killed["restarts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
