"""Start: this machine in one line, and the newest runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.ui.context import context_of
from lora_rocm.ui.machine_state import examined
from lora_rocm.ui.part import Part
from lora_rocm.ui.rendering import fragment, page
from lora_rocm.ui.run_list import newest_runs

TEMPLATE = "start.html.j2"
NUM_RUNS = 6


def start(request: Request) -> Response:
    """The page. The machine's line follows on its own, because examining a machine takes most of a second."""
    return page(request, TEMPLATE, runs=newest_runs(context_of(request).folders, NUM_RUNS))


def machine_line(request: Request) -> Response:
    """The machine's line, with the worst finding of ``doctor``."""
    return fragment(request, TEMPLATE, "machine", examined=examined())


def runs(request: Request) -> Response:
    """The newest runs, again."""
    return fragment(request, TEMPLATE, "runs", runs=newest_runs(context_of(request).folders, NUM_RUNS))


PART = Part(
    "start",
    "/",
    [Route("/", start), Route("/start/machine", machine_line), Route("/start/runs", runs)],
)
