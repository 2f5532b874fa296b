"""A supervisor over the fake worker, on a recorded machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.supervisor import Supervisor, in_force
from tests.hardware.situations import situation
from tests.supervisor.fake_run import save_recipe

ROOT = Path(__file__).parents[2]


def recipe_with(run_dir: RunDir, overrides: Sequence[str] = ()) -> Recipe:
    save_recipe(run_dir, *overrides)
    return load_recipe(run_dir.recipe).recipe


def supervisor(
    run_dir: RunDir,
    mode: str,
    overrides: Sequence[str],
    on_event: Callable[[dict[str, Any]], None],
    notify: Callable[[str], None],
    *,
    machine: str = "cpu-only",
    changes: tuple[str, ...] = (),
    **options: Any,
) -> Supervisor:
    recipe = recipe_with(run_dir, overrides)

    def command(checkpoint: Path | None, attempt: int, stacks_after_s: Mapping[str, float]) -> list[str]:
        command = [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]
        command += ["--checkpoint", checkpoint.name] if checkpoint else []
        return [*command, "--attempt", str(attempt), "--stacks-after", json.dumps(stacks_after_s)]

    made = in_force(run_dir, situation(machine, recipe=recipe, changes=changes), notify)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"read_log": lambda moment: (), "environ": environ, "pauses_s": (0.0,), **options}
    return Supervisor(run_dir, recipe, made, command, on_event, notify, again="lora-rocm train r.yaml", **options)
