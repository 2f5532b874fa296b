"""Runs: the list, and one run with its state, its curves, its previews and what happened to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of
from lora_rocm.ui.live import live_id
from lora_rocm.ui.part import Part
from lora_rocm.ui.rendering import fragment, page, url
from lora_rocm.ui.run_list import newest_runs
from lora_rocm.ui.thumbnails import MEDIA_TYPE, thumbnail

if TYPE_CHECKING:
    from lora_rocm.commands.status import StatusDocument

LIST, VIEW = "runs.html.j2", "run.html.j2"


def listed(request: Request) -> Response:
    """The list of runs."""
    return page(request, LIST, runs=newest_runs(context_of(request).folders))


def listed_again(request: Request) -> Response:
    """The rows of the list, again."""
    return fragment(request, LIST, "runs", runs=newest_runs(context_of(request).folders))


def view(request: Request) -> Response:
    """The page of one run."""
    run_dir = _run(request)
    name = context_of(request).folders.name_of(run_dir.path)
    live = url("/live", **{"run": name, "from": live_id(run_dir)})
    return page(request, VIEW, live=live, run_dir=run_dir, name=name, status=_status(run_dir))


def state(request: Request) -> Response:
    """The state of one run, again."""
    run_dir = _run(request)
    name = context_of(request).folders.name_of(run_dir.path)
    return fragment(request, VIEW, "state", run_dir=run_dir, name=name, status=_status(run_dir))


def picture(request: Request) -> Response:
    """A preview of a run, reduced."""
    run_dir = _run(request)
    path = context_of(request).folders.resolve(str(run_dir.path / query_of(request, "file")))
    content, version = thumbnail(path, 256)
    return Response(content, media_type=MEDIA_TYPE, headers={"etag": f'"{version}"'})


def _status(run_dir: RunDir) -> StatusDocument:
    from lora_rocm.commands.status import status

    return status(run_dir)


def _run(request: Request) -> RunDir:
    return context_of(request).folders.run(query_of(request, "dir"))


PART = Part(
    "run",
    "/runs",
    [
        Route("/runs", listed),
        Route("/runs/list", listed_again),
        Route("/runs/view", view),
        Route("/runs/state", state),
        Route("/runs/picture", picture),
    ],
)
