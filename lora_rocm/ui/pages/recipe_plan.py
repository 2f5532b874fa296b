"""The estimate of memory and time of a recipe, and the start of its run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import StoppedError, UserError
from lora_rocm.rundir.newest import is_run
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.edits import EditConflict
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.recipe_files import recipe_path
from lora_rocm.ui.rendering import fragment, is_fragment, page, url

if TYPE_CHECKING:
    from lora_rocm.commands.counts import Counts
    from lora_rocm.recipe.load import LoadedRecipe
    from lora_rocm.recipe.schema import Recipe

EDITOR, STARTED = "recipe.html.j2", "recipe_started.html.j2"
CARDS = ("8GB", "12GB", "16GB", "20GB", "24GB", "32GB", "48GB")
PLAN, MEASURE = "recipe-plan-", "recipe-measure-"
NOT_COUNTED = {"sample", "output", "timeouts", "cache"}
"""Sections that change neither memory nor time of a step."""
KNOWN_S = 1.5
"""Time for which an answer waits for an estimate with a known count. It usually takes less."""
_one_at_a_time = threading.Lock()
_newest: dict[str, str] = {}
_shown: dict[str, str] = {}
"""The work of the newest estimate of each recipe that was shown."""


async def plan(request: Request) -> Response:
    """Begin to count the memory of a text that is not saved yet, unless it was counted before.

    Only the newest text is counted: a child process takes seconds, and a slider makes many texts.
    """
    text = await text_of(request, "text")
    return await run_in_threadpool(_plan, request, text)


def _plan(request: Request, text: str) -> Response:
    from lora_rocm.commands.plan_cards import plan_cards
    from lora_rocm.rules.this_machine import situation_here

    ui, loaded = context_of(request), loaded_of(request, text)
    recipe, path, counts = loaded.recipe, str(loaded.path), _counts()
    key = PLAN + _digest(recipe)
    _newest[path] = key
    is_known = counts.knows(recipe, situation_here(recipe), for_card=True)

    def count(work: Work) -> object:
        with contextlib.nullcontext() if is_known else _one_at_a_time:
            if _newest.get(path) != key:
                raise StoppedError("superseded", "The recipe has changed since.")
            return plan_cards(recipe, CARDS, counts)

    work = _work(ui, key, count)
    work.wait(KNOWN_S if is_known else 0)
    if work.status == "done":
        _shown[path] = key
    before = ui.background.of(_shown.get(path, ""))
    counted = (recipe.spec.title, recipe.lora.rank, recipe.optim.optimizer)
    return fragment(request, EDITOR, "plan", plan_work=work, plan_before=before, plan_counted=counted)


@functools.cache
def _counts() -> Counts:
    """Return the counts of this server. The next one counts again."""
    from lora_rocm.commands.counts import Counts

    return Counts()


async def measure(request: Request) -> Response:
    """Begin ``lora-rocm plan`` for this machine's GPU. It measures the GPU in a child process."""
    text = await text_of(request, "text")
    return await run_in_threadpool(_measure, request, text)


def _measure(request: Request, text: str) -> Response:
    from lora_rocm.commands.plan import planned

    ui, loaded = context_of(request), loaded_of(request, text)

    def count(work: Work) -> object:
        with _one_at_a_time:
            return planned(loaded)

    work = _work(ui, MEASURE + _digest(loaded.recipe), count)
    return fragment(request, EDITOR, "measured", measure_work=work, measured_text=_measured_text(work))


def state(request: Request) -> Response:
    """The estimate, or its progress."""
    key = query_of(request, "work")
    work = context_of(request).background.of(key) if key.startswith((PLAN, MEASURE)) else None
    if work is None:
        fix = "Reload the page of the recipe."
        raise UserError("work-unknown", "This is not being done.", where=key[:100], fix=fix)
    if key.startswith(MEASURE):
        return fragment(request, EDITOR, "measured", measure_work=work, measured_text=_measured_text(work))
    if work.status == "running":  # the words of the first answer stay
        return Response(status_code=204)
    _shown.update((path, key) for path, newest in list(_newest.items()) if newest == key)
    return fragment(request, EDITOR, "plan", plan_work=work)


def _work(ui: UiContext, key: str, count: Callable[[Work], object]) -> Work:
    """Return the work with this key; begin it if it has no result yet."""
    work = ui.background.of(key)
    if work is not None and work.status in ("running", "done"):
        return work
    return ui.background.start(key, count)


def _measured_text(work: Work) -> str:
    from lora_rocm.commands.plan import render

    return "" if work.result is None else render(work.result)


def loaded_of(request: Request, text: str) -> LoadedRecipe:
    """Return the recipe of a text.

    Raises:
        RecipeError: it is wrong.
    """
    from lora_rocm.recipe.load import load_text

    folders = context_of(request).folders
    return load_text(text, Path(folders.name_of(recipe_path(folders, query_of(request, "file")))))


def _digest(recipe: Recipe) -> str:
    """Return a name for everything in a recipe that memory and time depend on."""
    kept = recipe.model_dump_json(exclude=NOT_COUNTED)
    return hashlib.sha256(kept.encode("utf-8", "replace")).hexdigest()[:20]


async def start(request: Request) -> Response:
    """Start a run of the saved recipe in its own process, as ``lora-rocm train`` does.

    ``text``: the text in the page. With the header If-Match, a file that was changed elsewhere is not trained.
    """
    shown = (await fields_of(request)).get("text", "")
    return await run_in_threadpool(_start, request, shown if isinstance(shown, str) else "")


def _start(request: Request, shown: str) -> Response:
    ui = context_of(request)
    path = recipe_path(ui.folders, query_of(request, "file"))
    if if_match := request.headers.get("if-match", "").strip('"'):
        content, version = ui.edits.read(path)
        if version != if_match:
            raise EditConflict(path, shown.encode("utf-8"), content, version)
    run_dir = ui.launches.train(path, (), ui.folders.working)
    address = url("/recipe/started", file=ui.folders.name_of(path), dir=str(run_dir))
    return JSONResponse({"address": address})


def started(request: Request) -> Response:
    """The time until the run exists, and the output of the command if it never does."""
    ui, wanted = context_of(request), query_of(request, "dir")
    launched = next((each for each in ui.launches.all() if str(each.run_dir) == wanted), None)
    if launched is None:
        fix = "Start it again from its recipe. The page Runs lists the runs that exist."
        raise UserError("no-run", "This run was not started here.", where=wanted[:200], fix=fix)
    if is_run(launched.run_dir):
        if not any(launched.run_dir.is_relative_to(each.path) for each in ui.folders.named):
            ui.folders.add(launched.run_dir.parent, "added")  # the user named it in the recipe
        address = url("/runs/view", dir=ui.folders.name_of(launched.run_dir))
        return Response(headers={"HX-Redirect": address}) if is_fragment(request) else RedirectResponse(address, 303)
    file = query_of(request, "file")
    if is_fragment(request):
        return fragment(request, STARTED, "waiting", launched=launched, file=file)
    return page(request, STARTED, launched=launched, file=file)


ROUTES = [
    Route("/recipe/plan", plan, methods=["POST"]),
    Route("/recipe/plan/measure", measure, methods=["POST"]),
    Route("/recipe/plan/state", state),
    Route("/recipe/start", start, methods=["POST"]),
    Route("/recipe/started", started),
]
