"""``lora-rocm bench``: start the measuring child process, continue after its crashes, and show the results."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_rocm import __version__
from lora_rocm.commands import bench_tables
from lora_rocm.commands.output import Notify, Output, OutputMode, json_value, unheard
from lora_rocm.errors import MachineError, StoppedError
from lora_rocm.foundation.files import followed, require_place, temporary_folder, write_json
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.processes.jobs import ComputeJob, LoaderJob, RowsJob, TransferJob
from lora_rocm.processes.row_runner import Row, fields_of, run_rows
from lora_rocm.recipe.load import LoadedRecipe, load_recipe  # recipe: the user names it
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.measured_line import WARM_UP, step_times
from lora_rocm.report.progress_bar import make_progress
from lora_rocm.rules.environment import plan
from lora_rocm.rules.this_machine import plan_here, situation_here
from lora_rocm.rundir.event_types import Event, LinkEvent, MachineEvent, StartEvent, StepEvent
from lora_rocm.rundir.events import current_steps, read_events
from lora_rocm.supervisor import choose_run_dir, worker_process

ONLY_STEPS = (
    "train.epochs=null",
    "train.validation_every_n_steps=0",
    "sample.prompts=[]",
    "sample.control_prompts=[]",
    "output.save_every_n_steps=1000000",
)
MADE_UP = ("lora.init_from=null", "data.sources=[]", "data.path=builtin:demo", "data.upscale=true")
WITH_HIPBLASLT = {"DISABLE_ADDMM_HIP_LT": "0", "TORCH_BLAS_PREFER_HIPBLASLT": "1", "ROCBLAS_USE_HIPBLASLT": "1"}
WITHOUT_HIPBLASLT = {"DISABLE_ADDMM_HIP_LT": "1", "TORCH_BLAS_PREFER_HIPBLASLT": "0", "ROCBLAS_USE_HIPBLASLT": "0"}
VARIANTS = {"Lt": WITH_HIPBLASLT, "no Lt": WITHOUT_HIPBLASLT}
"""AMD only: environment variables for measuring with and without hipBLASLt, regardless of the user's own setting."""
NO_VARIANTS: dict[str, dict[str, str]] = {"": {}}
NO_GPU = "There is no GPU to measure, or this PyTorch does not see it; "
GROUPS = {"gemm": "Matrix products", "attention": "Attention", "convolution": "Convolutions"}


@dataclass
class Measured:
    """Results reported by the child processes of one benchmark."""

    machine: Row = field(default_factory=dict)
    links: list[Any] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class BenchResult:
    """Figures of a benchmark.

    Attributes:
        bench: transfer, compute, loader or step.
        lora_rocm: version of this program.
        date: time at which the benchmark ended.
        machine: the measured machine: device, versions, memory, and number of images (loader).
        rows: figures of each row of the tables. If a row has no figures, its ``problem`` has the reason.
        links: PCIe link of each GPU, or null if unknown (transfer).
        recipe: the measured recipe, or null if none was needed (transfer).
        random_weights: whether the base has random weights and the images are the demo's (step).
    """

    bench: str
    lora_rocm: str
    date: str
    machine: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    links: tuple[dict[str, Any] | None, ...] = ()
    recipe: dict[str, Any] | None = None
    random_weights: bool = False


def _result(bench: str, found: Measured, recipe: Recipe | None = None, random_weights: bool = False) -> BenchResult:
    date, whole = time.strftime("%Y-%m-%dT%H:%M:%S%z"), None if recipe is None else recipe.model_dump(mode="json")
    rows, links = tuple(found.rows), tuple(found.links)
    return BenchResult(bench, __version__, date, found.machine, rows, links, whole, random_weights)


def finish(output: Output, measure: Callable[[], BenchResult], path: Path | None) -> int:
    """Run a benchmark, show its figures and return the exit code.

    Args:
        output: prints the result.
        measure: runs the benchmark.
        path: file to which the figures are written, or None.

    Raises:
        LoraRocmError: the benchmark failed, or the file cannot be written (checked before the benchmark).
    """
    require_place(path, "--output")
    found = measure()
    code = output.show(found, render(found))
    if path is not None:
        write_json(followed(path), json_value(found))
        output.notify("", f"Wrote {path}")
    return code


def transfer(notify: Notify = unheard, require_wanted: Callable[[], None] = lambda: None) -> BenchResult:
    """Measure copies between host and GPU.

    Args:
        notify: receives the number of measurements after each one.
        require_wanted: is called regularly. If it raises an error, the child process is killed.

    Raises:
        LoraRocmError: the child process could not start.
    """
    found = Measured()
    _measure(TransferJob(), plan_here().applied_to(os.environ), found, notify=notify, require_wanted=require_wanted)
    return _result("transfer", found)


def compute(
    recipe_path: str,
    overrides: Sequence[str] = (),
    notify: Notify = unheard,
    require_wanted: Callable[[], None] = lambda: None,
) -> BenchResult:
    """Measure the matrix products, attention and convolutions of a recipe's pass, without reading its weights or data.

    ``notify`` and ``require_wanted``: see ``transfer``.

    Raises:
        LoraRocmError: the child process could not start.
    """
    recipe = load_recipe(recipe_path, overrides).recipe
    situation, found = situation_here(recipe), Measured()
    env, torch = plan(situation).applied_to(os.environ), situation.facts.torch
    amd = situation.gpu is not None and torch is not None and torch.hip is not None
    for variant, variables in (VARIANTS if amd else NO_VARIANTS).items():
        job = ComputeJob(recipe=recipe.model_dump(mode="json"))
        _measure(job, {**env, **variables}, found, variant, notify, require_wanted)
    return _result("compute", found, recipe)


def step(
    recipe_path: str,
    overrides: Sequence[str] = (),
    *,
    steps: int = 30,
    random_weights: bool = False,
    output: Output | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    require_wanted: Callable[[], None] = lambda: None,
) -> BenchResult:
    """Train for some steps in a temporary folder and measure the time per step.

    Args:
        recipe_path: path of a recipe, or name of a shipped one.
        overrides: ``section.key=value`` settings.
        steps: number of timed steps, after a warm-up.
        random_weights: whether to use a base with random weights and the demo's images.
        output: shows the progress, or None for no display.
        advance: receives the number of trained steps and their total.
        require_wanted: is called regularly. If it raises a StoppedError, training is ended at once.

    Raises:
        StoppedError: the user stopped the benchmark.
        LoraRocmError: training failed.
    """
    stream = (output or Output(OutputMode.QUIET)).stream
    with temporary_folder() as folder:
        loaded = _short_run(recipe_path, overrides, steps, folder / "cache" if random_weights else None)
        chosen = choose_run_dir.choose(loaded, folder / "run", None)
        run = chosen.run_dir.create()
        choose_run_dir.settle(chosen, loaded, accept_changes=False)
        env = plan_here(loaded.recipe).applied_to(os.environ)
        with make_progress(stream) as progress:

            def on_event(event: Event) -> None:
                progress.on_event(event)
                if isinstance(event, StepEvent):
                    advance(event.updates, WARM_UP + steps)

            command = worker_process.worker_command(run)
            code = worker_process.run_worker(run, env, on_event, command, progress.notify, None, require_wanted)
        events = read_events(run.events())
    counted = current_steps(events)[-steps:]
    if code:
        raise StoppedError("stopped", "Stopped before the steps were measured.")
    if not counted:
        raise MachineError("nothing-measured", "Training ended without a step.", fix="Please report it.")
    start = next(fields_of(event) for event in events if isinstance(event, StartEvent))
    figures = step_figures(counted, loaded.recipe.train.batch_size * loaded.recipe.train.gradient_accumulation_steps)
    return _result("step", Measured(start, rows=[figures]), loaded.recipe, random_weights)


def _short_run(recipe_path: str, overrides: Sequence[str], steps: int, made_up_cache: Path | None) -> LoadedRecipe:
    """Load the recipe without previews, validation loss and checkpoints.

    Args:
        recipe_path: path of a recipe, or name of a shipped one.
        overrides: ``section.key=value`` settings.
        steps: number of timed steps.
        made_up_cache: cache folder for a base with random weights and the demo's images, or None for the recipe's own.
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
    """Return the step times' median and 95th percentile, the rate, peak memory, and the times of the trainer's parts.

    Args:
        steps: the ``step`` events.
        samples: number of samples per step.
    """
    times = step_times(step.step_s for step in steps)
    return {
        "steps": times.steps,
        "samples": samples,
        "median_s": times.median_s,
        "p95_s": times.p95_s,
        "samples_per_s": samples / times.median_s,
        "memory_bytes": max(step.memory_bytes for step in steps),
        "parts_s": {
            name: statistics.fmean(getattr(step, f"{name}_s") for step in steps) for name in bench_tables.PART_NAMES
        },
        "problem": None,
    }


def loader(recipe_path: str, overrides: Sequence[str] = (), notify: Notify = unheard) -> BenchResult:
    """Measure the rate of batches for several numbers of loader workers.

    Raises:
        LoraRocmError: the recipe or its images are wrong, or the child process could not start.
    """
    loaded, found = load_recipe(recipe_path, overrides), Measured()
    loaded.require_files()
    recipe = loaded.recipe
    env = plan_here(recipe).applied_to(os.environ)
    notify("Encoding missing cache entries, as training would. Each measurement then takes a few seconds.")
    _measure(LoaderJob(recipe=recipe.model_dump(mode="json")), env, found)
    return _result("loader", found, recipe)


def _measure(
    job: RowsJob,
    env: Mapping[str, str],
    found: Measured,
    variant: str = "",
    notify: Notify = unheard,
    require_wanted: Callable[[], None] = lambda: None,
) -> None:
    """Measure all rows of a job and add them to ``found``.

    If the child process dies, a new one continues with the next row.
    """

    def on_event(event: Event) -> None:
        match event:
            case MachineEvent():
                found.machine = fields_of(event)
            case LinkEvent():
                found.links = event.links

    def on_row(row: Row) -> None:
        found.rows.append({**row, "variant": variant})
        notify(f"Measurements: {len(found.rows)}")

    run_rows(job, env, on_row, on_event, require_wanted=require_wanted)


def render(result: BenchResult) -> str:
    """Return the tables of a benchmark as text."""
    return "\n".join(_lines(result))


def _lines(result: BenchResult) -> Iterator[str]:
    machine, rows = result.machine, result.rows
    match result.bench:
        case "transfer":
            yield machine_text(machine)
            link, text = _bus(result) if machine["gpu"] else (None, f"{NO_GPU}these are copies in main memory.")
            yield text
            yield from ("", *bench_tables.transfer_table(rows, link))
        case "compute":
            yield machine_text(machine)
            if not machine["gpu"]:
                yield f"{NO_GPU}the CPU is measured."
            variants = list(dict.fromkeys(row["variant"] for row in rows))
            for name in filter(None, variants):
                yield f"{name}: {' '.join(map('='.join, VARIANTS[name].items()))}"
            for group, heading in GROUPS.items():
                yield from ("", f"{heading}:", *bench_tables.compute_table(rows, group, variants))
        case "loader":
            batch_size = (result.recipe or {})["train"]["batch_size"]
            yield machine_text(machine)
            yield f"{count_text(machine['images'], 'image')}, batch size {batch_size}"
            yield from ("", *bench_tables.loader_table(rows), "", bench_tables.best_workers_text(rows))
        case _:
            yield from ("", *bench_tables.step_table(rows[0]))
    if missing := bench_tables.problems(rows):
        yield from ("", "Not measured (-):", *(f"  {problem}" for problem in missing))


def machine_text(machine: Row) -> str:
    """Return a one-line description of the measured machine."""
    runtime = f", HIP {machine['hip']}" if machine["hip"] else f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    others = f", {len(machine['gpus'])} GPUs" if len(machine["gpus"]) > 1 else ""
    threads = "" if machine["gpu"] else f", threads: {machine['threads']}"
    memory = f", {size_text(machine['budget_bytes'])} for tensors" if machine["budget_bytes"] else ""
    return f"{machine['device']}{others}{threads}{memory}, torch {machine['torch']}{runtime}"


def _bus(found: BenchResult) -> tuple[Row | None, str]:
    """Return the PCIe link to compare copies with, and a sentence about it. The link is None if there is none."""
    link: Row | None = found.links[0] if found.links else None
    if found.machine["integrated"]:
        return None, "This GPU shares main memory with the processor: there is no bus, and memory is the limit."
    if link is None:
        return None, "The limit of the bus is unknown: the system does not report the width and speed of its link."
    text = f"PCIe {link['generation']}.0 x{link['width']} ({link['address']}): {link['gb_per_s']} GB/s each way"
    if bench_tables.best_over_bus(found.rows) > link["gb_per_s"] * 1e9:
        return None, f"{text} according to the system, but more was measured: a virtual machine hides the real bus."
    return link, f"{text}, less the overhead of the bus protocol"
