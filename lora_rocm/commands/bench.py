"""``lora-rocm bench``: starts the child that measures, survives it, and shows what came of it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_rocm import __version__
from lora_rocm.commands import bench_tables
from lora_rocm.errors import WorkerDiedError
from lora_rocm.foundation.files import followed, write_json
from lora_rocm.foundation.units import size_text
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import plan
from lora_rocm.rules.this_machine import plan_here, situation_here
from lora_rocm.supervisor.subprocesses import run_tool

MODULE = "lora_rocm.bench.device_child"
LOADER_MODULE = "lora_rocm.bench.loader_child"
MAX_DEATHS = 5
"""After so many rows that ended the child the rest is not tried: nothing here works."""
WITH_HIPBLASLT = {"DISABLE_ADDMM_HIP_LT": "0", "TORCH_BLAS_PREFER_HIPBLASLT": "1", "ROCBLAS_USE_HIPBLASLT": "1"}
WITHOUT_HIPBLASLT = {"DISABLE_ADDMM_HIP_LT": "1", "TORCH_BLAS_PREFER_HIPBLASLT": "0", "ROCBLAS_USE_HIPBLASLT": "0"}
VARIANTS = {"Lt": WITH_HIPBLASLT, "no Lt": WITHOUT_HIPBLASLT}
"""AMD: the variables in which the profiles fast and safe differ, here set whatever the user set."""
NO_VARIANTS: dict[str, dict[str, str]] = {"": {}}
GROUPS = {"gemm": "Matrix products", "attention": "Attention", "convolution": "Convolutions"}

Event = dict[str, Any]


@dataclass
class Measured:
    """What the children of one benchmark said."""

    machine: Event = field(default_factory=dict)
    links: list[Any] = field(default_factory=list)
    rows: list[Event] = field(default_factory=list)


def transfer(json_path: Path | None) -> int:
    """Measure copies, print the table; returns the exit code.

    Raises:
        LoraRocmError: the child could not start, or the file cannot be written.
    """
    found = Measured()
    _measure("transfer", {}, plan_here().applied_to(os.environ), found)
    say(machine_text(found.machine))
    if not found.machine["gpu"]:
        say("There is no GPU to measure, or this PyTorch does not see it; these are copies in main memory.")
        link = None
    else:
        link, text = _bus(found)
        say(text)
    say("", *bench_tables.transfer_table(found.rows, link))
    return _finish("transfer", found, {"links": found.links}, json_path)


def compute(recipe_path: str | None, overrides: Sequence[str], json_path: Path | None) -> int:
    """Measure matrix products, attention and convolutions, print the tables; returns the exit code.

    Raises:
        LoraRocmError: the recipe is wrong, the child could not start, or the file cannot be written.
    """
    recipe = load_recipe(recipe_path, overrides).recipe if recipe_path is not None else None
    shapes, situation, found = _shapes(recipe), situation_here(recipe), Measured()
    env, torch = plan(situation).applied_to(os.environ), situation.facts.torch
    amd = situation.gpu is not None and torch is not None and torch.hip is not None
    variants = VARIANTS if amd else NO_VARIANTS
    for variant, variables in variants.items():
        _measure("compute", shapes, {**env, **variables}, found, variant=variant)
    say(machine_text(found.machine))
    if not found.machine["gpu"]:
        say("There is no GPU to measure, or this PyTorch does not see it; the CPU is measured, on small pictures.")
    if amd:
        say(*(f"{name}: {' '.join(map('='.join, variables.items()))}" for name, variables in variants.items()))
    for group, heading in GROUPS.items():
        say("", f"{heading}:", *bench_tables.compute_table(found.rows, group, tuple(variants)))
    return _finish("compute", found, {"shapes": shapes}, json_path)


def loader(recipe_path: str, overrides: Sequence[str], json_path: Path | None) -> int:
    """Measure how fast batches come by number of loader workers, print the table; returns the exit code.

    Raises:
        LoraRocmError: the recipe or its pictures are wrong, the child could not start, or the file cannot be written.
    """
    loaded, found = load_recipe(recipe_path, overrides), Measured()
    loaded.require_files()
    recipe = loaded.recipe
    say("Encoding what is missing in the cache, as training would; then each row takes some seconds.")
    _measure("loader", recipe.model_dump(mode="json"), plan_here(recipe).applied_to(os.environ), found, LOADER_MODULE)
    say(machine_text(found.machine), f"{found.machine['pictures']} pictures, batch size {recipe.train.batch_size}")
    say("", *bench_tables.loader_table(found.rows), "", bench_tables.best_workers_text(found.rows))
    return _finish("loader", found, {}, json_path)


def _shapes(recipe: Recipe | None) -> dict[str, int]:
    """What of a recipe decides the shapes; nothing without one (the child knows the defaults)."""
    if recipe is None:
        return {}
    return {
        "rank": recipe.lora.rank,
        "resolution": recipe.data.resolution,
        "batch_size": recipe.train.batch_size,
    }


def _measure(
    tool: str,
    shapes: Mapping[str, Any],
    env: Mapping[str, str],
    found: Measured,
    module: str = MODULE,
    variant: str = "",
) -> None:
    """All rows into ``found``. After a row that ends the child, a new one goes on behind it."""
    begun: Event = {}
    rows = 0

    def on_event(event: Event) -> None:
        nonlocal begun, rows
        match event["type"]:
            case "machine":
                found.machine = fields_of(event)
            case "link":
                found.links = event["links"]
            case "begin":
                begun = {**event, "at": time.monotonic()}
            case "row":
                rows = event["number"] + 1
                found.rows.append({**fields_of(event), "variant": variant})

    deaths = 0
    with tempfile.TemporaryDirectory(prefix="lora-rocm-") as folder:
        job = Path(folder) / "job.json"
        while True:
            write_json(job, {"start": rows, "shapes": dict(shapes)})
            try:
                run_tool(module, [tool, str(job)], env, on_event)
                return
            except WorkerDiedError as error:
                deaths += 1
                if not begun or deaths >= MAX_DEATHS:
                    raise
                if rows <= begun["number"]:
                    rows = begun["number"] + 1
                    found.rows.append(_died(begun, error, variant))


def _died(begun: Event, error: WorkerDiedError, variant: str) -> Event:
    """The row that ended the child."""
    hung = time.monotonic() - begun["at"] >= begun["limit_s"]
    how = f"did not end in {begun['limit_s']:g} s" if hung else f"ended the process: {how_it_died(error)}"
    empty = {"amount": None, "seconds": None, "per_second": None}
    return {**begun["fields"], **empty, "problem": how, "variant": variant}


def how_it_died(error: WorkerDiedError) -> str:
    """The reason from the first line of the error: "killed by signal SIGSEGV"."""
    return error.what.splitlines()[0].partition("saying why: ")[2].rstrip(".") or error.what


def fields_of(event: Event) -> Event:
    """What an event says, without what every one has."""
    return {key: value for key, value in event.items() if key not in ("type", "number")}


def machine_text(machine: Event) -> str:
    """What was measured, in a line."""
    runtime = f", HIP {machine['hip']}" if machine["hip"] else f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    others = f", {len(machine['gpus'])} GPUs" if len(machine["gpus"]) > 1 else ""
    threads = "" if machine["gpu"] else f", threads: {machine['threads']}"
    memory = f", {size_text(machine['budget_bytes'])} for tensors" if machine["budget_bytes"] else ""
    return f"{machine['device']}{others}{threads}{memory}, torch {machine['torch']}{runtime}"


def _bus(found: Measured) -> tuple[Event | None, str]:
    """The bus to compare with, where it is known, and what to say of it."""
    link: Event | None = found.links[0] if found.links else None
    if found.machine["integrated"]:
        return None, "This GPU shares main memory with the processor: there is no bus, and memory is the limit."
    if link is None:
        return None, "What the bus allows is not known: the system does not tell the width and speed of its link."
    text = f"PCIe {link['generation']}.0 x{link['width']} ({link['address']}): {link['gb_per_s']} GB/s each way"
    if bench_tables.best_over_bus(found.rows) > link["gb_per_s"] * 1e9:
        return None, f"{text} says the system, and more was measured: a virtual machine does not tell the real bus."
    return link, f"{text}, less what the bus's own protocol takes"


def _finish(what: str, found: Measured, more: Event, json_path: Path | None) -> int:
    missing = bench_tables.problems(found.rows)
    if missing:
        say("", "Not measured (-):", *(f"  {problem}" for problem in missing))
    if json_path is not None:
        head = {"bench": what, "lora_rocm": __version__, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(followed(json_path), {**head, "machine": found.machine, **more, "rows": found.rows})
        say("", f"Wrote {json_path}")
    return 0


def say(*lines: str) -> None:
    """Show lines at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
