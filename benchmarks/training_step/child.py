"""Child process of ``python -m benchmarks.training_step``: ``python -m benchmarks.training_step.child JOB.json``.

Emits events as in ``lora_rocm.children.bench.device_child``: ``machine`` once, then for each row ``begin``
before and ``row`` after. All rows come from this one process, in sequence; the memory of a row is freed before
the next.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch

from benchmarks.training_step.bare_loop import COMPILED, Inputs, inputs_of
from benchmarks.training_step.measurement import Figures, Wanted, matmul_rate, measure_bare, measure_ours, variants
from benchmarks.training_step.profile import wake_profiler
from benchmarks.training_step.setup import open_bench, recipe_for
from lora_rocm.children.measuring import machine, run_reported
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.device.torch_errors import device_fault
from lora_rocm.hardware.settings import Settings, settings_from
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import BeginEvent, MachineEvent, RowEvent
from lora_rocm.rundir.events import emit

OURS = "lora-rocm"
LIMIT_S = 1800.0
"""A row that takes longer counts as hung; compiling takes minutes."""


def main(arguments: list[str] | None = None, watch_parent: bool = True) -> int:
    """Measure. An unexpected error ends in a traceback, which the parent reads."""
    path = Path((arguments or sys.argv[1:])[0])
    return run_reported(partial(_measure, json.loads(path.read_text(encoding="utf-8")), path.parent, watch_parent))


def _measure(job: dict[str, Any], folder: Path, watch_parent: bool) -> None:
    recipe = recipe_for(recipe_from(job["recipe"]), job["random_weights"], folder)
    settings = settings_from(os.environ)
    device = choose_device(recipe.runtime.device, settings)
    apply(settings, device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings)
    wake_profiler(device)
    matmul = matmul_rate(device, dtype)
    libraries = {"diffusers": diffusers.__version__, "peft": peft.__version__, "python": sys.version.split()[0]}
    emit(MachineEvent(**{**machine(device, settings), **libraries, "matmul": matmul}))
    wanted = Wanted(job["steps"], job["profile"], Path(job["traces"]))
    names = variants(job["against"], device)
    inputs: Inputs | None = None
    number = 0
    for again in range(job["rounds"] if names else 1):
        fields = {"name": OURS, "round": again}
        _begin(number, fields)
        figures, inputs = _ours(recipe, settings, folder, job["random_weights"], watch_parent, wanted, matmul)
        _end(number, fields, figures)
        number += 1
        for name in names:
            if name == COMPILED and again:
                continue  # compiling again would give the same figure
            fields = {"name": name, "round": again}
            _begin(number, fields)
            _end(number, fields, _bare(recipe, inputs, dtype, device, name, wanted))
            number += 1


def _ours(
    recipe: Recipe,
    settings: Settings,
    folder: Path,
    random_weights: bool,
    watch_parent: bool,
    wanted: Wanted,
    matmul: Figures,
) -> tuple[Figures, Inputs]:
    with open_bench(recipe, settings, folder, random_weights, watch_parent) as bench:
        figures, inputs = measure_ours(bench, wanted, matmul), inputs_of(bench)
        figures["adapted_layers"] = len(bench.artifacts.adapter.modules)
        figures["trained_weights"] = sum(p.numel() for p in bench.artifacts.adapter.parameters.values())
        figures["dtype"] = str(bench.start.dtype).removeprefix("torch.")
    return figures, inputs


def _bare(
    recipe: Recipe, inputs: Inputs, dtype: torch.dtype, device: torch.device, name: str, wanted: Wanted
) -> Figures:
    try:
        return measure_bare(recipe, inputs, dtype, device, name, wanted)
    except (RuntimeError, MemoryError) as error:  # cannot be captured or compiled here, or does not fit
        if device_fault(error) is not None:
            raise
        return {"problem": next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]}


def _begin(number: int, fields: dict[str, Any]) -> None:
    emit(BeginEvent(number=number, limit_s=LIMIT_S, fields=fields))
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a C thread: ends the process even if a call hangs


def _end(number: int, fields: dict[str, Any], figures: Figures) -> None:
    faulthandler.cancel_dump_traceback_later()
    emit(RowEvent(number=number, **{"problem": None, **fields, **figures}))


if __name__ == "__main__":
    sys.exit(main())
