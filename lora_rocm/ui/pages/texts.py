"""Images, for language models: tables of texts that the user brings, and the first texts of a recipe as trained."""

from __future__ import annotations

from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, query_of
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


async def upload(request: Request) -> Response:
    """Save tables of texts in the page's folder, and offer the next step for each."""
    fields = await fields_of(request)
    try:
        files = [each for each in fields.getlist("files") if isinstance(each, UploadFile) and each.filename]
        if not files:
            raise UserError("no-upload", "There is no file to save.", where="files", fix="Choose a table of texts.")
        return await run_in_threadpool(_received, request, files)
    finally:
        await fields.close()


def _received(request: Request, files: list[UploadFile]) -> Response:
    from lora_rocm.ui.text_uploads import receive_tables

    working = context_of(request).folders.working
    found, tables = receive_tables(working, [(each.filename or "", each.file) for each in files])
    recipes = {name: _recipes_of(request, working / name) for name in found.saved}
    return fragment(request, "texts_upload.html.j2", "received", received=found, recipes=recipes, tables=tables)


def _recipes_of(request: Request, table: Path) -> list[str]:
    """Return the recipes in the page's folder that train on a table."""
    from lora_rocm.ui.image_set.reading import recipes_in

    folders, found = context_of(request).folders, list[str]()
    for path, recipe in recipes_in(folders.working):
        named = [source.dataset for source in recipe.data.sources]
        if any(name is not None and (folders.working / name).resolve() == table for name in named):
            found.append(folders.name_of(path))
    return found


def _recipe(request: Request) -> Path:
    recipe = context_of(request).folders.resolve(query_of(request, "recipe"))
    if not recipe.is_file():
        fix = "It may have been moved or deleted. The page Images and texts lists the recipes that exist."
        raise UserError("no-recipe", "There is no such recipe.", where=str(recipe), fix=fix)
    return recipe


ROUTES = [
    Route("/images/texts", texts),
    Route("/images/texts/samples", samples),
    Route("/images/texts/cancel", cancel, methods=["POST"]),
    Route("/images/texts/upload", upload, methods=["POST"]),
]
