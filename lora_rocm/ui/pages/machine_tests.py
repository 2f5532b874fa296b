"""Tests and benchmarks of the GPU, started on the page Machine. They use the GPU in child processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.page_parts.texts import t
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.free_gpu import require_no_training
from lora_rocm.ui.recipe_files import recipe_path
from lora_rocm.ui.rendering import fragment

TEMPLATE = "machine.html.j2"


@dataclass(frozen=True)
class MachineTest:
    """A test of the GPU.

    Attributes:
        run: runs it with the path of a recipe, reports its progress, and returns a text.
        needs_recipe: whether it measures a recipe. If not, the path is not used.
    """

    run: Callable[[Work, str], str]
    needs_recipe: bool = False


def self_test(work: Work, recipe: str) -> str:
    """Run the self-test of ``lora-rocm doctor``. Its progress has the results."""
    from lora_rocm.rules.this_machine import situation_here
    from lora_rocm.supervisor import selftest_runner

    selftest_runner.self_test(situation_here(deep=True), work.report, require_wanted=work.require_wanted)
    return ""


def transfer(work: Work, recipe: str) -> str:
    """Run ``lora-rocm bench transfer``, and return its tables."""
    from lora_rocm.commands import bench

    return bench.render(bench.transfer(work.report, work.require_wanted))


def compute(work: Work, recipe: str) -> str:
    """Run ``lora-rocm bench compute``, and return its tables."""
    from lora_rocm.commands import bench

    return bench.render(bench.compute(recipe, (), work.report, work.require_wanted))


def step(work: Work, recipe: str) -> str:
    """Run ``lora-rocm bench step``, and return its table. It trains in a temporary folder."""
    from lora_rocm.commands import bench

    work.report(t("work.loading"))
    return bench.render(bench.step(recipe, advance=work.advance, require_wanted=work.require_wanted)).strip("\n")


TESTS: Mapping[str, MachineTest] = {
    "self-test": MachineTest(self_test),
    "transfer": MachineTest(transfer),
    "step": MachineTest(step, needs_recipe=True),
    "compute": MachineTest(compute, needs_recipe=True),
}
"""Name -> the test."""


_beginning = threading.Lock()
"""Two tests at once would slow each other down, and measure that."""


def state(request: Request) -> Response:
    """The tests: their buttons, progress and results. ``of``: "recipe" for those that measure a recipe."""
    return _state(request, of_recipe=request.query_params.get("of") == "recipe")


def _state(request: Request, *, of_recipe: bool) -> Response:
    background = context_of(request).background
    tests = {name: background.of(_key(name)) for name, test in TESTS.items() if test.needs_recipe is of_recipe}
    return fragment(request, TEMPLATE, "tests", tests=tests, of_recipe=of_recipe)


async def begin(request: Request) -> Response:
    """Begin a test in the background, unless a run is training."""
    name, recipe = await text_of(request, "test"), (await fields_of(request)).get("recipe", "")
    return await run_in_threadpool(_begin, request, name, recipe if isinstance(recipe, str) else "")


def _begin(request: Request, name: str, recipe: str) -> Response:
    ui, test = context_of(request), TESTS.get(name)
    if test is None:
        raise UserError("field-unknown", "There is no such test.", where=name[:40], fix="Reload the page.")
    require_no_training(ui.folders)
    path = _recipe(request, recipe) if test.needs_recipe else None

    def run(work: Work) -> str:
        if path is None:
            return test.run(work, "")
        return f"{ui.folders.name_of(path)}:\n{test.run(work, str(path))}"

    with _beginning:
        if any((work := ui.background.of(_key(each))) is not None and work.status == "running" for each in TESTS):
            fix = "Wait until it ends, or cancel it."
            raise UserError("work-runs-already", "Another test of the GPU is running.", where=name, fix=fix)
        ui.background.start(_key(name), run)
    return _state(request, of_recipe=test.needs_recipe)


def _recipe(request: Request, name: str) -> Path:
    if not name:
        raise UserError("field-missing", "No recipe is chosen.", where="recipe", fix="Choose a recipe.")
    path = recipe_path(context_of(request).folders, name)
    if not path.is_file():
        fix = "It may have been moved or deleted. The page Recipe lists those that exist."
        raise UserError("no-recipe", "There is no recipe here.", where=str(path), fix=fix)
    return path


def cancel(request: Request) -> Response:
    """Cancel a test. Its child process is ended at once."""
    name = query_of(request, "test")
    if (work := context_of(request).background.of(_key(name))) is not None:
        work.cancel()
        work.wait(1.0)
    return _state(request, of_recipe=name in TESTS and TESTS[name].needs_recipe)


def _key(name: str) -> str:
    return f"machine-{name}"


ROUTES = [
    Route("/machine/tests", state),
    Route("/machine/tests/begin", begin, methods=["POST"]),
    Route("/machine/tests/cancel", cancel, methods=["POST"]),
]
