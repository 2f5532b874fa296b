"""Out of memory: SDXL at full size under a cap of the allocator, by the real command; a toy on the CPU.

usage: python benchmarks/reliability.py memory ROOT [--caps-gib 24,12] [--steps 4] [--batch 16] [--toy] [--json FILE]

Makes a random SDXL from the published configs (as ``full_size_sdxl.py``; 7 GB under ROOT) and images of 1024 px. Runs
``lora-rocm train`` at the batch size, without gradient checkpointing, once for each cap. The plan gets the cap like an
APU's budget (``memory_limit_bytes``, set_per_process_memory_fraction); supervisor and worker are the real ones. It
passes if each run finishes with the requested effective batch. ``--toy``: the builtin model on the CPU. The cap is then
a system limit of the worker's address space (Linux), in MiB above its size when training begins. The LoRA must
equal an unlimited run's LoRA to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.full_size_sdxl import make_images, make_model
from benchmarks.limited_worker import PRECISE, SPARE

ROOT = Path(__file__).resolve().parents[1]
GIB, MIB = 2**30, 2**20
TOY_CAPS_MIB, TOY_SIDE_PX, TOY_BATCH = "250,160", 320, 8
TOLERANCE = 1e-2
"""Largest difference between the LoRAs of a capped and an unlimited toy, relative to the largest value of a tensor.
Adam's first updates divide each gradient by itself, so different rounding shows there.
"""

LAUNCH = r"""
import sys
from pathlib import Path
from lora_rocm.commands import train
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.errors import LoraRocmError
from lora_rocm.rules import environment
from lora_rocm.rules.rule import Rule, When
from lora_rocm.supervisor import worker
recipe, run_dir, cap, worker = sys.argv[1:]
if worker:
    worker.WORKER = worker
if int(cap):
    own = Rule("cap", "setting:memory_limit_bytes", cap, "measured under a cap", "-", When(amd=False))
    environment.rules = lambda every=environment.rules: (*every(), own)
try:
    sys.exit(train.train(RunRequest(recipe, run_dir=Path(run_dir))))
except LoraRocmError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
"""The command itself, with one more rule; a toy's worker limits itself."""


def write_recipe(root: Path, options: argparse.Namespace, side_px: int, model: str) -> Path:
    """Write the recipe of all runs."""
    recipe = root / "memory.yaml"
    device = "runtime: {device: cpu, threads: 1}\n" if options.toy else ""
    recipe.write_text(
        f"model: {{name_or_path: '{model}'}}\n"
        f"data: {{path: '{root / 'images'}', resolution: {side_px}}}\n"
        "lora: {rank: 16, targets: attention}\n"
        f"train: {{max_train_steps: {options.steps}, batch_size: {options.batch}, seed: 1}}\n{device}"
        f"cache: {{dir: '{root / 'cache'}'}}\n"
        f"output: {{save_every_n_steps: {options.steps}, dtype: fp32}}\n",
        encoding="utf-8",
    )
    return recipe


def run(root: Path, recipe: Path, name: str, cap_bytes: int, toy: bool, batch: int) -> dict[str, Any]:
    """Run the command once under a cap (0: none); return its outcome."""
    run_dir = root / f"run-{name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    environ = {
        **os.environ,
        "LORA_ROCM_HOME": str(root / f"home-{name}"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    # a later run must not reuse facts that this one learns
    shutil.rmtree(environ["LORA_ROCM_HOME"], ignore_errors=True)
    worker = ""
    if toy:
        environ |= {**PRECISE, SPARE: str(cap_bytes)}
        worker, cap_bytes = "benchmarks.limited_worker", 0
    started = time.perf_counter()
    command = [sys.executable, "-c", LAUNCH, str(recipe), str(run_dir), str(cap_bytes), worker]
    code = subprocess.run(command, env=environ, cwd=ROOT).returncode
    return {"run": name, "exit_code": code, "wall_s": round(time.perf_counter() - started, 1)} | figures(run_dir, batch)


def figures(run_dir: Path, batch: int) -> dict[str, Any]:
    """Return figures from the events of a run."""
    path = run_dir / "events.jsonl"
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    of_type = {name: [event for event in events if event["type"] == name] for name in {e["type"] for e in events}}
    steps, incidents = of_type.get("step", []), of_type.get("incident", [])
    changes = [event["id"] for event in of_type.get("change", [])]
    errors = [f"{event['code']}: {event['what']} ({event['where']})" for event in of_type.get("error", [])]
    times_s = [event["step_s"] for event in steps]
    usual_s = statistics.median(times_s[1:]) if len(times_s) > 1 else None
    cut_short = [
        # from the last step before a restart to that restart: work that was lost with the worker
        later["time"] - earlier["time"]
        for earlier, later in pairwise(e for e in events if e["type"] in ("step", "start", "error"))
        if later["type"] == "start"
    ]
    # changes and restarts by the supervisor
    supervisor = run_dir / "events.supervisor.jsonl"
    told = (
        [json.loads(line) for line in supervisor.read_text(encoding="utf-8").splitlines()]
        if supervisor.exists()
        else []
    )
    parts = 1 << changes.count("micro-batch-halved")
    return {
        "finished": (run_dir / "result.json").exists(),
        "steps": len(steps),
        "parts": min(parts, batch),
        "recomputing": "checkpointing" in changes,
        "changes": changes + [f"supervisor: {event['id']}" for event in told if event["type"] == "change"],
        "effective_batch": batch,
        "out_of_memory": sum(event["kind"] == "out-of-memory" for event in incidents),
        "seen": [f"{event['detail']:.160} -> {event['action']}" for event in incidents],
        "first_step_s": times_s[0] if times_s else None,
        "median_step_s": usual_s,
        "lost_in_steps_s": round(sum(max(0.0, taken - usual_s) for taken in times_s), 3) if usual_s else None,
        "lost_in_restarts_s": round(sum(cut_short), 1),
        "restarts": sum(event["type"] == "restart" for event in told),
        "peak_memory_GiB": max((event["memory_bytes"] for event in steps), default=0) / GIB,
        "losses": [event["loss"] for event in steps],
        "errors": errors,
        "notices": [event["text"] for event in of_type.get("notice", [])],
    }


def difference(root: Path, one: str, other: str) -> float:
    """Return the largest difference between two LoRAs, relative to the largest value of its tensor."""
    from safetensors.torch import load_file

    left, right = (load_file(root / f"run-{name}" / "lora.safetensors") for name in (one, other))
    return max(float((left[name] - right[name]).abs().max() / left[name].abs().max().clamp(min=1e-12)) for name in left)


def main(argv: list[str]) -> int:
    """Run under each cap, print, and judge; return 0 if every run finished as asked."""
    parser = argparse.ArgumentParser(prog="reliability.py memory")
    parser.add_argument("root", type=Path)
    parser.add_argument("--caps-gib", help="caps, 24,12 (with --toy in MiB)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    options.batch = options.batch or (TOY_BATCH if options.toy else 16)
    root, side_px = options.root.resolve(), TOY_SIDE_PX if options.toy else 1024
    root.mkdir(parents=True, exist_ok=True)
    # images, model and recipe
    make_images(root / "images", side_px)
    model = "builtin:tiny-sdxl" if options.toy else str(root / "model")
    if not options.toy and not (root / "model" / "unet").is_dir():
        make_model(root / "model")
    recipe = write_recipe(root, options, side_px, model)
    unit, letters = (MIB, "MiB") if options.toy else (GIB, "GiB")
    caps = [int(cap) for cap in (options.caps_gib or (TOY_CAPS_MIB if options.toy else "24,12")).split(",")]
    # one run per cap
    rows = []
    for cap in [0, *caps] if options.toy else caps:
        name = f"{cap}{letters}" if cap else "free"
        rows.append(run(root, recipe, name, cap * unit, options.toy, options.batch))
        if options.toy and cap and rows[-1]["finished"]:
            rows[-1]["difference"] = difference(root, "free", name)
        print(json.dumps(rows[-1], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    # judge the runs
    good = [
        row["finished"] and row["steps"] == options.steps and row.get("difference", 0.0) <= TOLERANCE for row in rows
    ]
    print(f"{sum(good)} of {len(rows)} runs finished {options.steps} updates of {options.batch} images each")
    return 0 if all(good) else 1
