"""``lora-rocm bench``: starts the measuring child process, survives its crashes, and shows the results."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_rocm import __version__
from lora_rocm.commands import bench_tables
from lora_rocm.foundation.files import followed, require_place, temporary_folder, write_json
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.processes.jobs import ComputeJob, LoaderJob, RowsJob, TransferJob
from lora_rocm.processes.row_runner import Row, fields_of, run_rows
from lora_rocm.recipe.load import LoadedRecipe, load_recipe
from lora_rocm.report.progress_bar import make_progress
from lora_rocm.rules.environment import plan
from lora_rocm.rules.this_machine import plan_here, situation_here
from lora_rocm.rundir.event_types import Event, LinkEvent, MachineEvent, StartEvent, StepEvent
from lora_rocm.rundir.events import current_steps, read_events
from lora_rocm.supervisor import resume, worker

WARM_UP = 20
"""Steps before the counted ones: kernels are compiled, and steps of the usual sizes captured as graphs."""
ONLY_STEPS = (
    "train.epochs=null",
    "train.validation_every_n_steps=0",
    "sample.prompts=[]",
    "sample.control_prompts=[]",
    "output.save_every_n_steps=1000000",
)
MADE_UP = (
    "lora.init_from=null",
    "data.sources=[]",
    "data.path=builtin:demo",
    "data.upscale=true",
)
WITH_HIPBLASLT = {"DISABLE_ADDMM_HIP_LT": "0", "TORCH_BLAS_PREFER_HIPBLASLT": "1", "ROCBLAS_USE_HIPBLASLT": "1"}
WITHOUT_HIPBLASLT = {"DISABLE_ADDMM_HIP_LT": "1", "TORCH_BLAS_PREFER_HIPBLASLT": "0", "ROCBLAS_USE_HIPBLASLT": "0"}
VARIANTS = {"Lt": WITH_HIPBLASLT, "no Lt": WITHOUT_HIPBLASLT}
"""AMD: the variables in which the profiles fast and safe differ, set here regardless of the user's values."""
NO_VARIANTS: dict[str, dict[str, str]] = {"": {}}
GROUPS = {"gemm": "Matrix products", "attention": "Attention", "convolution": "Convolutions"}


@dataclass
class Measured:
    """Results reported by the child processes of one benchmark."""

    machine: Row = field(default_factory=dict)
    links: list[Any] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def transfer(json_path: Path | None) -> int:
    """Measure copies and print the table; returns the exit code.

    Raises:
        LoraRocmError: the child could not start, or the file cannot be written.
    """
    require_place(json_path, "--json")
    found = Measured()
    _measure(TransferJob(), plan_here().applied_to(os.environ), found)
    say(machine_text(found.machine))
    if not found.machine["gpu"]:
        say("There is no GPU to measure, or this PyTorch does not see it; these are copies in main memory.")
        link = None
    else:
        link, text = _bus(found)
        say(text)
    say("", *bench_tables.transfer_table(found.rows, link))
    return _finish("transfer", found, {"links": found.links}, json_path)


def compute(recipe_path: str, overrides: Sequence[str], json_path: Path | None) -> int:
    """Measure the products, attention and convolutions of a recipe's pass, and print tables; returns the exit code.

    Neither weights nor data of the recipe are read.

    Raises:
        LoraRocmError: the child could not start, or the file cannot be written.
    """
    require_place(json_path, "--json")
    recipe = load_recipe(recipe_path, overrides).recipe
    situation, found = situation_here(recipe), Measured()
    env, torch = plan(situation).applied_to(os.environ), situation.facts.torch
    amd = situation.gpu is not None and torch is not None and torch.hip is not None
    variants = VARIANTS if amd else NO_VARIANTS
    for variant, variables in variants.items():
        _measure(ComputeJob(recipe=recipe.model_dump(mode="json")), {**env, **variables}, found, variant)
    say(machine_text(found.machine))
    if not found.machine["gpu"]:
        say("There is no GPU to measure, or this PyTorch does not see it; the CPU is measured.")
    if amd:
        say(*(f"{name}: {' '.join(map('='.join, variables.items()))}" for name, variables in variants.items()))
    for group, heading in GROUPS.items():
        say("", f"{heading}:", *bench_tables.compute_table(found.rows, group, tuple(variants)))
    return _finish("compute", found, {}, json_path)


def step(recipe_path: str, overrides: Sequence[str], steps: int, random_weights: bool, json_path: Path | None) -> int:
    """Train for some steps in a temporary folder and print the time per step; returns the exit code.

    Args:
        recipe_path: a file, or the name of a recipe that ships.
        overrides: ``section.key=value``.
        steps: number of counted steps after a warm-up.
        random_weights: use a base model with random weights, and the images of the demo.
        json_path: file to write the figures to.

    Raises:
        LoraRocmError: any error of training, or the file cannot be written.
    """
    require_place(json_path, "--json")
    with temporary_folder() as folder:
        loaded = _short_run(recipe_path, overrides, steps, folder / "cache" if random_weights else None)
        chosen = resume.choose(loaded, folder / "run", None)
        run = chosen.run_dir.create()
        resume.settle(chosen, loaded, accept_changes=False)
        env = plan_here(loaded.recipe).applied_to(os.environ)
        with make_progress() as progress:
            code = worker.run_worker(run, env, progress.on_event, worker.worker_command(run), progress.say)
        events = read_events(run.events())
    counted = current_steps(events)[-steps:]
    if code or not counted:
        return code
    start = next(fields_of(event) for event in events if isinstance(event, StartEvent))
    figures = step_figures(counted, loaded.recipe.train.batch_size * loaded.recipe.train.gradient_accumulation_steps)
    say("", *bench_tables.step_table(figures))
    about = {"recipe": loaded.recipe.model_dump(mode="json"), "random_weights": random_weights}
    return _finish("step", Measured(start, rows=[figures]), about, json_path)


def _short_run(recipe_path: str, overrides: Sequence[str], steps: int, made_up_cache: Path | None) -> LoadedRecipe:
    """Load the recipe without previews, validation loss and checkpoints.

    With ``made_up_cache``, base model and data are made up, too.
    """
    changes = [*overrides, f"train.max_train_steps={WARM_UP + steps}", *ONLY_STEPS]
    if made_up_cache is not None:
        base = load_recipe(recipe_path, overrides).recipe.model
        files = [key for key in (*base.part_keys, "config") if key in type(base).model_fields]
        changes += [*MADE_UP, *(f"model.{key}=null" for key in files)]
        changes += [f"model.name_or_path=random:{base.name_or_path}", f"cache.dir={made_up_cache}"]
    loaded = load_recipe(recipe_path, changes)
    loaded.require_files()
    return loaded


def step_figures(steps: Sequence[StepEvent], samples: int) -> Row:
    """Return median and 95th percentile of ``step`` events, rate, peak memory and the trainer's own parts."""
    seconds = sorted(step.step_s for step in steps)
    median_s = statistics.median(seconds)
    return {
        "steps": len(seconds),
        "samples": samples,
        "median_s": median_s,
        "p95_s": seconds[-(-95 * len(seconds) // 100) - 1],
        "samples_per_s": samples / median_s,
        "memory_bytes": max(step.memory_bytes for step in steps),
        "parts_s": {
            name: statistics.fmean(getattr(step, f"{name}_s") for step in steps) for name in bench_tables.PART_NAMES
        },
        "problem": None,
    }


def loader(recipe_path: str, overrides: Sequence[str], json_path: Path | None) -> int:
    """Measure the loading rate of batches by number of workers and print the table; returns the exit code.

    Raises:
        LoraRocmError: the recipe or its images are wrong, the child could not start, or the file cannot be written.
    """
    require_place(json_path, "--json")
    loaded, found = load_recipe(recipe_path, overrides), Measured()
    loaded.require_files()
    recipe = loaded.recipe
    env = plan_here(recipe).applied_to(os.environ)
    say("Encoding what is missing in the cache, as training would; then each row takes some seconds.")
    _measure(LoaderJob(recipe=recipe.model_dump(mode="json")), env, found)
    images = count_text(found.machine["images"], "image")
    say(machine_text(found.machine), f"{images}, batch size {recipe.train.batch_size}")
    say("", *bench_tables.loader_table(found.rows), "", bench_tables.best_workers_text(found.rows))
    return _finish("loader", found, {}, json_path)


def _measure(job: RowsJob, env: Mapping[str, str], found: Measured, variant: str = "") -> None:
    """Measure all rows into ``found``. If a row ends the child process, a new one continues after that row."""

    def on_event(event: Event) -> None:
        match event:
            case MachineEvent():
                found.machine = fields_of(event)
            case LinkEvent():
                found.links = event.links

    def on_row(row: Row) -> None:
        found.rows.append({**row, "variant": variant})

    run_rows(job, env, on_row, on_event)


def machine_text(machine: Row) -> str:
    """Return a description of the measured machine, in one line."""
    runtime = f", HIP {machine['hip']}" if machine["hip"] else f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    others = f", {len(machine['gpus'])} GPUs" if len(machine["gpus"]) > 1 else ""
    threads = "" if machine["gpu"] else f", threads: {machine['threads']}"
    memory = f", {size_text(machine['budget_bytes'])} for tensors" if machine["budget_bytes"] else ""
    return f"{machine['device']}{others}{threads}{memory}, torch {machine['torch']}{runtime}"


def _bus(found: Measured) -> tuple[Row | None, str]:
    """Return the PCIe link to compare with, if known, and a sentence about it."""
    link: Row | None = found.links[0] if found.links else None
    if found.machine["integrated"]:
        return None, "This GPU shares main memory with the processor: there is no bus, and memory is the limit."
    if link is None:
        return None, "What the bus allows is not known: the system does not tell the width and speed of its link."
    text = f"PCIe {link['generation']}.0 x{link['width']} ({link['address']}): {link['gb_per_s']} GB/s each way"
    if bench_tables.best_over_bus(found.rows) > link["gb_per_s"] * 1e9:
        return None, f"{text} says the system, and more was measured: a virtual machine does not tell the real bus."
    return link, f"{text}, less what the bus's own protocol takes"


def _finish(what: str, found: Measured, more: Row, json_path: Path | None) -> int:
    missing = bench_tables.problems(found.rows)
    if missing:
        say("", "Not measured (-):", *(f"  {problem}" for problem in missing))
    if json_path is not None:
        head = {"bench": what, "lora_rocm": __version__, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(followed(json_path), {**head, "machine": found.machine, **more, "rows": found.rows})
        say("", f"Wrote {json_path}")
    return 0


def say(*lines: str) -> None:
    """Print lines immediately."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
