"""Start: this machine in one line, and the newest runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.ui.context import context_of
from lora_rocm.ui.machine_state import examined
from lora_rocm.ui.part import Part
from lora_rocm.ui.recipe_files import has_recipes
from lora_rocm.ui.rendering import fragment, page, url
from lora_rocm.ui.run_list import newest_runs

TEMPLATE = "start.html.j2"
NUM_RUNS = 6
DEMO = "demo.yaml"
"""The shipped recipe with a tiny model and its own images."""


def start(request: Request) -> Response:
    """The page. The machine's line follows on its own, because examining a machine takes most of a second."""
    folders = context_of(request).folders
    return page(request, TEMPLATE, runs=newest_runs(folders, NUM_RUNS), has_recipes=has_recipes(folders))


def machine_line(request: Request) -> Response:
    """The machine's line, with the worst finding of ``doctor``."""
    return fragment(request, TEMPLATE, "machine", examined=examined())


def runs(request: Request) -> Response:
    """The newest runs, again."""
    return fragment(request, TEMPLATE, "runs", runs=newest_runs(context_of(request).folders, NUM_RUNS))


def demo(request: Request) -> Response:
    """Start the demo, a run of the shipped recipe ``demo``: it needs no file of the user."""
    ui = context_of(request)
    run_dir = ui.launches.train(DEMO, (), ui.folders.working)
    return RedirectResponse(url("/recipe/started", file=DEMO, dir=str(run_dir)), 303)


PART = Part(
    "start",
    "/",
    [
        Route("/", start),
        Route("/start/machine", machine_line),
        Route("/start/runs", runs),
        Route("/start/demo", demo, methods=["POST"]),
    ],
)
