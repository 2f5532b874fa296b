"""Machine: what ``doctor`` finds, the environment that training gets, the caches, and the folders of this page."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.fields import text_of
from lora_rocm.ui.machine_state import examined
from lora_rocm.ui.pages import machine_tests
from lora_rocm.ui.part import Part
from lora_rocm.ui.recipe_files import listed_recipes
from lora_rocm.ui.rendering import fragment, page
from lora_rocm.ui.run_list import run_names

if TYPE_CHECKING:
    from lora_rocm.cache_store.maintenance import CacheStats
    from lora_rocm.report.measured_line import MeasuredLine

TEMPLATE = "machine.html.j2"
CACHE = Path("cache")
REPORT = "lora-rocm-report.txt"
SPEED_RUNS = 5
"""Number of the newest runs that are tried for a measured speed."""


def machine(request: Request) -> Response:
    """The page. The findings follow on their own, because examining a machine takes most of a second."""
    ui = context_of(request)
    return page(request, TEMPLATE, caches=_caches(ui), recipes=listed_recipes(ui.folders))


def findings(request: Request) -> Response:
    """The findings of ``doctor`` and the environment of training."""
    return fragment(request, TEMPLATE, "findings", examined=examined(afresh="again" in request.query_params))


def report(request: Request) -> Response:
    """The file for a bug report, as ``lora-rocm doctor --report`` writes it: without private data."""
    from lora_rocm.commands.doctor import doctor
    from lora_rocm.foundation.files import temporary_folder

    with temporary_folder() as folder:
        doctor(report_file=folder / REPORT, quick=True)
        content = (folder / REPORT).read_bytes()
    if "shown" in request.query_params:
        return fragment(request, TEMPLATE, "report", report=content.decode("utf-8", "replace"))
    headers = {"content-disposition": f'attachment; filename="{REPORT}"'}
    return Response(content, media_type="text/plain; charset=utf-8", headers=headers)


def speed(request: Request) -> Response:
    """The measured speed of the newest run that has enough steps, as a line for a public table."""
    run_name, found = _newest_speed(context_of(request))
    return fragment(request, TEMPLATE, "speed", run_name=run_name, measured=found)


async def add_folder(request: Request) -> Response:
    """Add a folder with files that the page may show."""
    context_of(request).folders.add(Path(await text_of(request, "folder")), "added")
    return RedirectResponse("/machine#folders", 303)


async def forget(request: Request) -> Response:
    """Forget the mitigations that failures added on this machine, as ``lora-rocm forget`` does."""
    from lora_rocm.rules.this_machine import forget_here

    return fragment(request, TEMPLATE, "forgotten", said=forget_here().splitlines())


def _newest_speed(ui: UiContext) -> tuple[str, MeasuredLine | None]:
    """Return the name of a run for requests, and its line; an empty name and None if no newer run has a line."""
    from lora_rocm.report.measured_line import measured_line

    for name, _ in run_names(ui.folders, SPEED_RUNS):
        with contextlib.suppress(LoraRocmError):  # the run's own page has the reason
            return name, measured_line(ui.views.of(ui.folders.run(name)))
    return "", None


def _caches(ui: UiContext) -> CacheStats | None:
    from lora_rocm.cache_store import maintenance

    try:
        return maintenance.stats(ui.folders.working / CACHE)
    except UserError:  # no cache here yet
        return None


PART = Part(
    "machine",
    "/machine",
    [
        Route("/machine", machine),
        Route("/machine/findings", findings),
        Route("/machine/report", report),
        Route("/machine/speed", speed),
        Route("/machine/folders", add_folder, methods=["POST"]),
        Route("/machine/forget", forget, methods=["POST"]),
        *machine_tests.ROUTES,
    ],
)
