"""Starts the child process that measures training steps, compares with a bare loop if asked, and shows the results."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.training_step import tables
from lora_rocm import __version__
from lora_rocm.commands.bench import machine_text
from lora_rocm.commands.output import Output
from lora_rocm.errors import WorkerDiedError
from lora_rocm.foundation.files import followed, make_folder, write_json
from lora_rocm.processes.process import OnEvent
from lora_rocm.processes.row_runner import fields_of, how_it_died
from lora_rocm.processes.tool import follow_tool
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.this_machine import plan_here
from lora_rocm.rundir.event_types import BeginEvent, Event, MachineEvent, RowEvent
from lora_rocm.rundir.exit_status import worker_died_error

ROOT = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.training_step.child"
OURS = "lora-rocm"
TRACES = "bench-step-traces"
notify = Output().notify
OVER_ROUNDS = ("median_s", "p95_s", "mean_s", "samples_per_s")

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The requested measurement.

    random_weights: use random numbers instead of a base model and images.
    against: None, "bare", "bare-eager" or "bare-compiled".
    profile: keep traces, and show kernels.
    """

    steps: int
    random_weights: bool
    profile: bool
    against: str | None
    rounds: int = 2


@dataclass
class Measured:
    """Results reported by the child process, one row per measurement."""

    machine: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def step(recipe_path: str, overrides: Sequence[str], asked: Asked, json_path: Path | None) -> int:
    """Measure training steps and print the tables; returns the exit code.

    Raises:
        LoraRocmError: the recipe, its base model or its images are wrong; the child could not start, or died before
            our own steps were measured; or a file cannot be written.
    """
    loaded, found = load_recipe(recipe_path, overrides), Measured()
    if not asked.random_weights:
        loaded.require_files()
        notify("Encoding what is missing in the cache, as training would.")
    traces = (json_path.parent if json_path is not None else Path()).absolute() / TRACES
    if asked.profile:
        make_folder(traces)
    head: Row = {"bench": "step", "lora_rocm": __version__, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    head |= {"recipe": loaded.recipe.model_dump(mode="json"), "random_weights": asked.random_weights}

    def keep(**more: Any) -> None:
        if json_path is not None:
            write_json(followed(json_path), {**head, "machine": found.machine, "rows": found.rows, **more})

    _measure(loaded.recipe, asked, traces if asked.profile else None, found, keep)
    rows = over_rounds(found.rows)
    price, unlike = price_of(rows), unlike_of(rows)
    notify("", *_text(loaded.recipe, asked, found.machine, rows, price, unlike))
    keep(price=price, unlike=unlike)
    return 0


def _measure(recipe: Recipe, asked: Asked, traces: Path | None, found: Measured, keep: Callable[[], None]) -> None:
    """Measure all rows into ``found``, and ``keep`` each. If the child dies after our own steps, the row names it."""
    begun: Row = {}

    def on_event(event: Event) -> None:
        match event:
            case MachineEvent():
                found.machine = fields_of(event)
                notify(machine_text(found.machine))
            case BeginEvent():
                begun.update(event.fields, at=time.monotonic(), limit_s=event.limit_s)
                notify(f"Measuring {begun['name']}{', again' if begun['round'] else ''} ...")
            case RowEvent():
                found.rows.append(fields_of(event))
                keep()
                if not found.rows[-1][
                    "problem"
                ]:  # printed at once: the next measurement takes minutes, or ends the process
                    notify(*tables.step_table(found.rows[-1:]))

    # run the child process; its death becomes a row if our own steps were measured
    with tempfile.TemporaryDirectory(prefix="lora-rocm-", ignore_cleanup_errors=True) as folder:
        job = {
            "recipe": recipe.model_dump(mode="json"),
            "random_weights": asked.random_weights,
            "steps": asked.steps,
            "profile": asked.profile,
            "against": asked.against,
            "rounds": asked.rounds,
            "traces": str(traces or folder),
        }
        write_json(Path(folder) / "job.json", job)
        try:
            run(Path(folder) / "job.json", plan_here(recipe).applied_to(os.environ), on_event)
        except WorkerDiedError as error:
            if not found.rows:
                raise
            hung = time.monotonic() - begun["at"] >= begun["limit_s"]
            how = f"did not end in {begun['limit_s']:g} s" if hung else f"ended the process: {how_it_died(error)}"
            found.rows.append({"name": begun["name"], "round": begun["round"], "problem": how})


def run(job: Path, env: Mapping[str, str], on_event: OnEvent) -> None:
    """Run the child process to its end.

    Raises:
        LoraRocmError: the error event that it wrote.
        WorkerDiedError: it failed without an error event.
    """
    command = [sys.executable, "-m", MODULE, str(job)]
    folders = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    code, log = follow_tool(command, {**env, "PYTHONPATH": folders}, on_event)
    if code:
        raise worker_died_error(f"The process {MODULE}", code, log)


def over_rounds(rows: Sequence[Row]) -> list[Row]:
    """Return one row per variant: times are means over rounds, all other figures are from the last round."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    merged = []
    for same in by_name.values():
        whole = [row for row in same if not row["problem"]]
        if not whole:
            merged.append(same[0])
            continue
        row = dict(whole[-1])
        row |= {name: statistics.fmean(each[name] for each in whole) for name in OVER_ROUNDS}
        merged.append(row)
    return merged


def price_of(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Return our trainer's cost over each bare loop: ratio of times per sample, and difference of peaks in bytes."""
    ours = next(row for row in rows if row["name"] == OURS)
    found = {}
    for row in rows:
        if row is ours or row["problem"]:
            continue
        found[row["name"]] = {
            "wall": _ratio(_a_sample(ours, ours["median_s"]), _a_sample(row, row["median_s"])),
            "busy": _ratio(_a_sample(ours, ours["profile"]["busy_s"]), _a_sample(row, row["profile"]["busy_s"])),
            "kernels": _ratio(_a_sample(ours, ours["profile"]["kernels"]), _a_sample(row, row["profile"]["kernels"])),
            "peak_bytes": None
            if row["peak_allocated_bytes"] is None
            else ours["peak_allocated_bytes"] - row["peak_allocated_bytes"],
        }
    return found


def unlike_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the memory-saving differences between our run and each bare loop.

    If any, the time ratio is not comparable.
    """
    ours = next(row for row in rows if row["name"] == OURS)
    return {row["name"]: list(_unlike(ours, row)) for row in rows if row is not ours and not row["problem"]}


def _unlike(ours: Row, bare: Row) -> Iterator[str]:
    blocks, recomputed, offloaded = (ours[name] for name in ("blocks", "recomputed_blocks", "offloaded_blocks"))
    if recomputed and not bare["recomputes"]:
        yield f"{OURS} recomputes {recomputed} of {blocks} blocks, and the bare loop keeps everything"
    elif recomputed < blocks and bare["recomputes"]:
        yield f"the bare loop recomputes all blocks, and {OURS} {recomputed} of {blocks}"
    if offloaded:
        yield f"{OURS} has {offloaded} of {blocks} blocks wait in main memory, and the bare loop keeps all weights"
    if ours["parts"] > 1:
        yield f"{OURS} computes a micro-batch in {ours['parts']} parts, and the bare loop at once"


def _a_sample(row: Row, value: float | None) -> float | None:
    return None if value is None else value / row["samples"]


def _ratio(ours: float | None, others: float | None) -> float | None:
    return ours / others if ours is not None and others else None


def _text(
    recipe: Recipe,
    asked: Asked,
    machine: Row,
    rows: Sequence[Row],
    price: Mapping[str, Row],
    unlike: Mapping[str, list[str]],
) -> list[str]:
    whole = [row for row in rows if not row["problem"]]
    ours = next(row for row in whole if row["name"] == OURS)
    lines = [_about(recipe, asked, ours), "", *tables.step_table(whole)]
    product = machine["matmul"]
    lines += [
        "",
        f"A product of {product['side']} x {product['side']} matrices in {product['dtype']}: "
        f"{product['per_second'] / 1e12:.4g} TFLOP/s in this process.",
        "",
        f"Where a step of {OURS} goes:",
        *tables.parts_table(ours),
    ]
    lines += tables.price_text(price)
    lines += [f"Not alike, {name}: {'; '.join(texts)}." for name, texts in unlike.items() if texts]
    if asked.profile:
        lines += ["", "Kernels by kind, ms (number) a step:", *tables.kinds_table(whole)]
        lines += ["", f"What takes longest in a step of {OURS}:", *tables.top_table(ours)]
        lines += ["", "Traces, for a browser's tracing page:", *(f"  {row['profile']['trace']}" for row in whole)]
    if machine["gpu"] and not ours["profile"]["device_seen"]:
        lines += ["", "PyTorch's profiler sees nothing of this GPU: operators were counted in the place of kernels."]
    if ours["incidents"]:
        lines += ["", "This happened meanwhile:", *(f"  {text}" for text in dict.fromkeys(ours["incidents"]))]
    missing = [f"  {row['name']}: {row['problem']}" for row in rows if row["problem"]]
    return [*lines, *(["", "Not measured:", *missing] if missing else [])]


def _about(recipe: Recipe, asked: Asked, ours: Row) -> str:
    train = recipe.train
    base = "random weights" if asked.random_weights else recipe.model.name_or_path
    parts = f" in {ours['parts']} parts" if ours["parts"] > 1 else ""
    return (
        f"{recipe.model.family}, {base}, {recipe.data.resolution} px, batch {train.batch_size}{parts}"
        f"{f' x {train.gradient_accumulation_steps}' if train.gradient_accumulation_steps > 1 else ''}, "
        f"{ours['dtype']}, rank {recipe.lora.rank} on {ours['adapted_layers']} layers "
        f"({ours['trained_weights'] / 1e6:.2f} M weights), {_checkpointing(ours)}"
    )


def _checkpointing(ours: Row) -> str:
    blocks, recomputed, offloaded = (ours[name] for name in ("blocks", "recomputed_blocks", "offloaded_blocks"))
    words = f"{'with' if recomputed else 'without'} gradient checkpointing"
    if 0 < recomputed < blocks:
        words = f"{recomputed} of {blocks} blocks recomputed"
    return f"{words}, {offloaded} of {blocks} blocks offloaded" if offloaded else words
