"""Images, for language models: the first texts of a recipe, with their trained parts marked, and their tokens."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of
from lora_rocm.ui.pages.image_changes import work_key
from lora_rocm.ui.rendering import fragment, page

TEMPLATE = "texts.html.j2"


def texts(request: Request) -> Response:
    """The page of a recipe's texts. They follow on their own, because a child process reads them."""
    return page(request, TEMPLATE, recipe=_recipe(request), name=query_of(request, "recipe"))


def samples(request: Request) -> Response:
    """The first texts, or the progress of reading them."""
    from lora_rocm.ui.text_samples import text_samples

    ui, recipe = context_of(request), _recipe(request)
    key = work_key(recipe, "texts")
    work = ui.background.of(key)
    if work is None or ("again" in request.query_params and work.status != "running"):
        work = ui.background.start(key, lambda started: text_samples(recipe, started))
    return fragment(request, TEMPLATE, "samples", work=work, key=key, name=query_of(request, "recipe"))


def cancel(request: Request) -> Response:
    """Cancel. The child process that is reading ends its answer first."""
    work = context_of(request).background.of(work_key(_recipe(request), "texts"))
    if work is not None:
        work.cancel()
    return Response(status_code=204)


def _recipe(request: Request) -> Path:
    recipe = context_of(request).folders.resolve(query_of(request, "recipe"))
    if not recipe.is_file():
        fix = "It may have been moved or deleted. The page Images lists the recipes that exist."
        raise UserError("no-recipe", "There is no such recipe.", where=str(recipe), fix=fix)
    return recipe


ROUTES = [
    Route("/images/texts", texts),
    Route("/images/texts/samples", samples),
    Route("/images/texts/cancel", cancel, methods=["POST"]),
]
