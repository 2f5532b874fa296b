"""The findings of ``check`` in the data of a recipe that is being edited: images, captions, masks, crops, steps."""

from __future__ import annotations

import hashlib
import threading

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import StoppedError, UserError
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of, text_of
from lora_rocm.ui.pages.recipe_plan import loaded_of
from lora_rocm.ui.rendering import fragment

EDITOR, CHECK = "recipe.html.j2", "recipe-check-"
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
    path = str(loaded.path)
    digest = hashlib.sha256(f"{path}\0{loaded.recipe.model_dump_json()}".encode("utf-8", "replace"))
    key = CHECK + digest.hexdigest()[:20]
    _newest[path] = key

    def work(work: Work) -> object:
        with _one_at_a_time:
            if _newest.get(path) != key:
                raise StoppedError("superseded", "The recipe has changed since.")
            return checked(loaded, "")

    now = ui.background.of(key)
    before = now if now is not None and now.status == "done" else ui.background.of(_shown.get(path, ""))
    if now is None or now.status != "running":
        now = ui.background.start(key, work)
    return fragment(request, EDITOR, "check", check_work=now, check_before=before)


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
]
