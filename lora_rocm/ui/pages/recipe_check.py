"""The findings of ``check`` in the data of a recipe that is being edited: images, captions, masks, crops, steps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lora_rocm.errors import StoppedError, UserError
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of, text_of
from lora_rocm.ui.pages.recipe_plan import loaded_of
from lora_rocm.ui.rendering import fragment

if TYPE_CHECKING:
    from lora_rocm.commands.check import CheckResult
    from lora_rocm.commands.run_intervals import FittedKey
    from lora_rocm.planning.data_plan import RunPlan
    from lora_rocm.recipe.load import LoadedRecipe

EDITOR, CHECK = "recipe.html.j2", "recipe-check-"


@dataclass(frozen=True)
class CheckedText:
    """A checked text. found: what ``check`` found. fitting: values of intervals that do not fit the run's length."""

    found: CheckResult
    fitting: Sequence[FittedKey]


_one_at_a_time = threading.Lock()
_newest: dict[str, str] = {}
_shown: dict[str, str] = {}
"""The work of the newest check of each recipe that was shown."""


async def check(request: Request) -> Response:
    """Begin ``lora-rocm check`` of a text that is not saved yet. Of many texts, only the newest is checked.

    It is checked each time, because files in the folders may have changed.
    """
    text = await text_of(request, "text")
    return await run_in_threadpool(_check, request, text)


def _check(request: Request, text: str) -> Response:
    from lora_rocm.commands.check import checked

    ui, loaded = context_of(request), loaded_of(request, text)
    path, key = str(loaded.path), _key(loaded)
    _newest[path] = key

    def work(work: Work) -> object:
        with _one_at_a_time:
            if _newest.get(path) != key:
                raise StoppedError("superseded", "The recipe has changed since.")
            found = checked(loaded, "")
            return CheckedText(found, fitting_keys(loaded, found.plan))

    now = ui.background.of(key)
    before = now if now is not None and now.status == "done" else ui.background.of(_shown.get(path, ""))
    if now is None or now.status != "running":
        now = ui.background.start(key, work)
    return fragment(request, EDITOR, "check", check_work=now, check_before=before)


def _key(loaded: LoadedRecipe) -> str:
    digest = hashlib.sha256(f"{loaded.path}\0{loaded.recipe.model_dump_json()}".encode("utf-8", "replace"))
    return CHECK + digest.hexdigest()[:20]


def fitting_keys(loaded: LoadedRecipe, plan: RunPlan | None) -> list[FittedKey]:
    """Return the intervals that do not fit the run's length, with values that fit; none if its length is unknown."""
    from lora_rocm.commands.run_intervals import fitted_keys
    from lora_rocm.recipe.yaml_tree import value_at

    if plan is None:
        return []

    def has(section: str, key: str) -> bool:
        return value_at(loaded.layers.data, (section, key)) is not None

    data = plan.data
    how_sure = "" if plan.steps_are_given else data.how_sure
    return fitted_keys(loaded.recipe, has, data.max_train_steps, data.steps_per_epoch, how_sure)


async def fit(request: Request) -> Response:
    """The text with intervals that fit its run. Comments and other lines stay, and nothing is saved."""
    text = await text_of(request, "text")
    return await run_in_threadpool(_fit, request, text)


def _fit(request: Request, text: str) -> Response:
    from lora_rocm.ui.recipe_draft import edited

    loaded = loaded_of(request, text)
    work = context_of(request).background.of(_key(loaded))
    if work is None or not isinstance(work.result, CheckedText):
        fix = "Wait until the box with its images or texts shows the number of steps."
        raise UserError("work-unknown", "The length of this run is not known yet.", where=str(loaded.path), fix=fix)
    found = edited(text, loaded.path)
    for each in work.result.fitting:
        found = edited(found.with_value(f"{each.section}.{each.key}", str(each.value)), loaded.path)
    return JSONResponse({"text": found.text})


def state(request: Request) -> Response:
    """The result of a check; no content while it runs, so that the last result stays."""
    key = query_of(request, "work")
    work = context_of(request).background.of(key) if key.startswith(CHECK) else None
    if work is None:
        fix = "Reload the page of the recipe."
        raise UserError("work-unknown", "This is not being done.", where=key[:100], fix=fix)
    if work.status == "running":
        return Response(status_code=204)
    _shown.update((path, key) for path, newest in list(_newest.items()) if newest == key)
    return fragment(request, EDITOR, "check", check_work=work)


ROUTES = [
    Route("/recipe/check", check, methods=["POST"]),
    Route("/recipe/check/state", state),
    Route("/recipe/check/fit", fit, methods=["POST"]),
]
