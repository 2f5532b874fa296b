"""``lora-rocm tune``: finds the fastest right solution of each matrix product of a recipe, once for this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lora_rocm.errors import MachineError, WorkerDiedError
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.hardware.measured_choice import Choice, Tuned, path_of, store, stored, table_of
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.processes.jobs import TuneProductsJob
from lora_rocm.processes.row_runner import Row, how_it_died, run_rows
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rules.environment import plan
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rules.tuned_rules import key_of

LIMIT_S, START_LIMIT_S = 600.0, 600.0


def tune(recipe_path: str, overrides: Sequence[str], registry: Registry = PRODUCT, module: str | None = None) -> int:
    """Tune the matrix products of a recipe's step and keep the table; print one line a product.

    Args:
        recipe_path: the recipe; neither model nor images are read.
        overrides: ``section.key=value``.
        registry: the available model families.
        module: in place of the child's module.

    Raises:
        LoraRocmError: the recipe is wrong, there is no GPU, or the table cannot be written.
    """
    recipe = load_recipe(recipe_path, overrides, registry).recipe
    situation = situation_here(recipe)
    stack = stack_of(situation.facts, situation.selection)
    if stack is None or recipe.runtime.device == "cpu":
        raise MachineError(
            "no-gpu-to-tune",
            "There is no GPU here that the installed PyTorch could use, so there is nothing to tune.",
            where=f"runtime.device: {recipe.runtime.device}",
            fix="lora-rocm doctor says what it sees.",
        )
    env = plan(replace(situation, tuned=Tuned())).applied_to(os.environ)
    if env.get("ROCBLAS_USE_HIPBLASLT") == "0":  # this GPU must not try its solutions either
        env["PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED"] = "0"
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        _say(row_text(row))

    key, folder = key_of("products", stack, recipe), Path(situation.app_dir)
    job = TuneProductsJob(recipe=recipe.model_dump(mode="json"), limit_s=LIMIT_S)
    try:
        run_rows(job, env, on_row, start_limit_s=START_LIMIT_S, module=module)
    except WorkerDiedError as error:
        if not rows:
            raise
        _say(f"Given up after {len(rows)} products: {how_it_died(error)}. What was tuned before is kept.")
    finally:
        kept = _with_those_before(rows, stored(folder, "products", key))
        table = table_text(kept)
        if rows:
            store(folder, Choice("products", key, table, kept))
    _say(*summary(rows))
    if not table:
        raise MachineError(
            "nothing-tuned",
            "No product could be tuned, so there is no table.",
            where=str(folder),
            fix="The reasons stand above. Runs go on with the library's own choice.",
        )
    _say(f"Wrote {table_of(path_of(folder, 'products', key))}")
    _say("New runs of this recipe on this GPU and software use it in the profile fast (runtime.profile).")
    return 0


def _with_those_before(rows: Sequence[Row], before: Choice | None) -> list[Row]:
    """The rows, after those of products that were tuned before and are not among them: what is wrong now leaves."""
    products = {row["product"] for row in rows}
    return [*(dict(row) for row in (before.rows if before else ()) if row["product"] not in products), *rows]


def table_text(rows: Sequence[Row]) -> str:
    """The table of all products that were right, as torch reads it."""
    good = [row for row in rows if row["problem"] is None]
    validators = good[-1]["validators"] if good else []
    entries = {tuple(entry[:2]): entry for row in good for entry in row["entries"]}
    lines = [["Validator", *validator] for validator in validators] + list(entries.values())
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


def row_text(row: Row) -> str:
    """A product's row for the terminal."""
    if row["problem"] is not None:
        return f"  {row['product']}: left out: {row['problem']}"
    solutions = ", ".join(entry[2] for entry in row["entries"]) or "tuned before"
    before, after = row["default_s"] * 1e6, row["seconds"] * 1e6
    return f"  {row['product']} ({row['count']} in a step): {before:.1f} us by default, {after:.1f} us by {solutions}"


def summary(rows: Sequence[Row]) -> list[str]:
    """What was tuned, what was left out, and the time of a step's products before and after."""
    good = [row for row in rows if row["problem"] is None]
    before, after = (sum(row["count"] * row[name] for row in good) * 1e3 for name in ("default_s", "seconds"))
    lines = [f"{len(good)} of {len(rows)} products tuned: {before:.2f} ms of a step by default, {after:.2f} ms tuned."]
    if good and all(entry[2] == "Default" for row in good for entry in row["entries"]):
        lines.append(
            "This PyTorch knows only its default solutions, so nothing can become faster (ROCm builds know others)."
        )
    return lines


def _say(*lines: str) -> None:
    sys.stdout.write("".join(legible(line) + "\n" for line in lines))
    sys.stdout.flush()
