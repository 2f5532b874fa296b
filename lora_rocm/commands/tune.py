"""``lora-rocm tune``: find the fastest correct kernel for each matrix product of a recipe, once per machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_rocm.commands.output import Failure, Notify, unheard
from lora_rocm.errors import MachineError, WorkerDiedError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.hardware.tuned_choice import Choice, Tuned, path_of, store, stored, table_of
from lora_rocm.processes.jobs import TuneProductsJob
from lora_rocm.processes.row_runner import Row, how_it_died, run_rows
from lora_rocm.recipe.load import load_recipe  # recipe: the user names it
from lora_rocm.rules.environment import plan
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rules.tuned_rules import key_of

LIMIT_S, START_LIMIT_S = 600.0, 600.0
TIMES = ("default_s", "seconds")


@dataclass(frozen=True)
class TunedProduct:
    """One matrix product of a step.

    Attributes:
        product: sizes and number format of the product.
        problem: why it was skipped, or null if it was tuned.
        count: number of times that a step computes it.
        default_s: time in seconds with the library's own choice.
        seconds: time in seconds with the fastest correct solution.
        solutions: names of the chosen solutions; empty if it was tuned before.
    """

    product: str
    problem: str | None
    count: int | None = None
    default_s: float | None = None
    seconds: float | None = None
    solutions: tuple[str, ...] = ()


@dataclass(frozen=True)
class TuneResult:
    """Result of ``lora-rocm tune``.

    Attributes:
        products: the products that were measured now.
        table: the file that runs with ``runtime.profile: fast`` use.
        error: why there is no table, or null if there is one.
    """

    products: tuple[TunedProduct, ...]
    table: Path
    error: Failure | None = None


def tune(
    recipe_path: str,
    overrides: Sequence[str] = (),
    registry: FamilyRegistry = FAMILIES,
    module: str | None = None,
    notify: Notify = unheard,
) -> TuneResult:
    """Tune the matrix products of a recipe's step and store the table.

    Args:
        recipe_path: path or name of the recipe. Neither its model nor its images are read.
        overrides: ``section.key=value`` settings.
        registry: the available families.
        module: module of the child process, or None for the usual one.
        notify: receives each product after its measurement.

    Raises:
        LoraRocmError: the recipe is wrong, there is no GPU, or the table cannot be written.
    """
    # check that there is a GPU
    recipe = load_recipe(recipe_path, overrides, registry).recipe
    situation = situation_here(recipe)
    stack = stack_of(situation.facts, situation.selection)
    if stack is None or recipe.runtime.device == "cpu":
        raise MachineError(
            "no-gpu-to-tune",
            "There is no GPU here that the installed PyTorch could use, so there is nothing to tune.",
            where=f"runtime.device: {recipe.runtime.device}",
            fix="lora-rocm doctor shows which GPUs it sees.",
        )
    # measure in child processes, and keep the results even if they fail or the user stops
    env = plan(replace(situation, tuned=Tuned())).applied_to(os.environ)
    if env.get("ROCBLAS_USE_HIPBLASLT") == "0":  # hipBLASLt is off for this GPU, so its solutions must not be tried
        env["PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED"] = "0"
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        notify(row_text(_product(row)))

    key, folder = key_of("products", stack, recipe), Path(situation.app_dir)
    job = TuneProductsJob(recipe=recipe.model_dump(mode="json"), limit_s=LIMIT_S)
    try:
        run_rows(job, env, on_row, start_limit_s=START_LIMIT_S, module=module)
    except WorkerDiedError as error:
        if not rows:
            raise
        notify(f"Tuning ended early, after {len(rows)} products: {how_it_died(error)}. The results so far are kept.")
    finally:
        kept = _with_those_before(rows, stored(folder, "products", key))
        table = table_text(kept)
        if rows:
            store(folder, Choice("products", key, table, kept))
    # report the table, or why there is none
    nothing = MachineError(
        "nothing-tuned",
        "No product could be tuned, so there is no table.",
        where=str(folder),
        fix="See the reasons above. Runs continue with the library's own choice.",
    )
    products, path = tuple(map(_product, rows)), table_of(path_of(folder, "products", key))
    return TuneResult(products, path, None if table else Failure.of(nothing))


def _product(row: Row) -> TunedProduct:
    if row["problem"] is not None:
        return TunedProduct(row["product"], row["problem"])
    solutions = tuple(entry[2] for entry in row["entries"])
    return TunedProduct(row["product"], None, row["count"], row["default_s"], row["seconds"], solutions)


def _with_those_before(rows: Sequence[Row], before: Choice | None) -> list[Row]:
    """Return the stored rows of all other products, followed by the new rows.

    A product that fails now loses its stored row.
    """
    products = {row["product"] for row in rows}
    return [*(dict(row) for row in (before.rows if before else ()) if row["product"] not in products), *rows]


def table_text(rows: Sequence[Row]) -> str:
    """Return a table of all products with a correct solution, in torch's file format."""
    good = [row for row in rows if row["problem"] is None]
    validators = good[-1]["validators"] if good else []
    entries = {tuple(entry[:2]): entry for row in good for entry in row["entries"]}
    lines = [["Validator", *validator] for validator in validators] + list(entries.values())
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


def row_text(row: TunedProduct) -> str:
    """Return a line about one product, for the terminal."""
    if row.problem is not None:
        return f"  {row.product}: skipped: {row.problem}"
    solutions = ", ".join(row.solutions) or "tuned before"
    before, after = (row.default_s or 0.0) * 1e6, (row.seconds or 0.0) * 1e6
    return f"  {row.product} ({row.count} per step): {before:.1f} us by default, {after:.1f} us by {solutions}"


def render(result: TuneResult) -> str:
    """Return the result as text: the number of tuned products, and their total time per step before and after."""
    good = [row for row in result.products if row.problem is None]
    before, after = (sum((row.count or 0) * (getattr(row, name) or 0.0) for row in good) * 1e3 for name in TIMES)
    counted = f"{len(good)} of {len(result.products)} products tuned"
    lines = [f"{counted}: {before:.2f} ms per step by default, {after:.2f} ms tuned."]
    if good and all(name == "Default" for row in good for name in row.solutions):
        lines.append("This PyTorch has only default solutions, so nothing can become faster (ROCm builds have others).")
    if result.error is None:
        lines.append(f"Wrote {result.table}")
        lines.append("New runs of this recipe on this GPU and software use it with runtime.profile: fast.")
    return "\n".join(lines)
