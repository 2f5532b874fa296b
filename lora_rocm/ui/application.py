"""The application: all parts in one table, the live stream, static files, and one guard before them."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.live import offsets_of
from lora_rocm.ui.pages import choose, image_part, machine, queue, recipe, run, start, try_lora
from lora_rocm.ui.part import Part
from lora_rocm.ui.rendering import problem
from lora_rocm.ui.security import RequestGuard

STATIC = Path(__file__).with_name("static")
SHARED: list[str | tuple[str, str]] = [("lora_rocm.page_parts", "static")]
"""The package and folder of the files that single files contain as well."""
PARTS: Sequence[Part] = (
    start.PART,
    image_part.PART,
    recipe.PART,
    queue.PART,
    run.PART,
    choose.PART,
    try_lora.PART,
    machine.PART,
)
"""All parts, in the order of the navigation: Start, Images, Recipe, Queue, Runs, Choose, Try, Machine."""


class StaticFolder(StaticFiles):
    """The program's own files. A browser asks each time whether its copy is still current."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["cache-control"] = "no-cache"
        return answer


def create_app(context: UiContext, host: str = "127.0.0.1") -> RequestGuard:
    """Return the application of one server.

    Args:
        context: the values that the handlers share.
        host: the value of ``--host``.
    """
    context.parts = PARTS
    routes: list[BaseRoute] = [route for part in PARTS for route in part.routes]
    routes += [Route("/live", live_stream), Mount("/static", StaticFolder(directory=STATIC, packages=SHARED))]
    handlers: Mapping[Any, Any] = {
        LoraRocmError: on_error,
        HTTPException: on_http_error,
        Exception: on_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.ui = context
    return RequestGuard(app, context.access, host)


async def live_stream(request: Request) -> Response:
    """The live stream of a tab: of one run (``run``), or of the list of runs."""
    ui = context_of(request)
    named = request.query_params.get("run")
    run_dir = None if named is None else ui.folders.run(named)
    place = request.headers.get("last-event-id") or request.query_params.get("from", "")
    stream = ui.live.subscribe(run_dir, offsets_of(place) or (0, 0))
    if stream is None:
        return PlainTextResponse("There are too many open pages.\n", 503)
    return StreamingResponse(ui.live.messages(stream), media_type="text/event-stream")


def on_error(request: Request, error: Exception) -> Response:
    """An error of the project: the same words as on the command line."""
    assert isinstance(error, LoraRocmError)
    return problem(request, error)


def on_http_error(request: Request, error: Exception) -> Response:
    """An address that does not exist, or that takes another method."""
    assert isinstance(error, HTTPException)
    if error.status_code != 404:
        return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
    fix = "Follow a link of the navigation."
    return problem(request, UserError("page-missing", "There is no such page.", where=request.url.path, fix=fix))


def on_bug(request: Request, error: Exception) -> Response:
    """Anything else is a bug. The user sees which, and the server goes on."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # a name that a request gave
        fix = "Give a name of at most 255 bytes."
        return problem(request, UserError("name-too-long", "No file can have so long a name.", fix=fix))
    what = f"The page failed in an unexpected way: {type(error).__name__}: {error}"
    context_of(request).report(f"{request.method} {request.url.path}: {what}")
    fix = "Please report this as a bug, with these lines. The runs are not affected."
    return problem(request, LoraRocmError("page-failed", what, where=request.url.path, fix=fix))
