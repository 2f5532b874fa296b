"""Images: what training skips and why, the buckets, and images that occur twice. Each is found in the background."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of
from lora_rocm.ui.pages.image_changes import work_key
from lora_rocm.ui.pages.images import here, listing_for, reading_for
from lora_rocm.ui.rendering import fragment

TEMPLATE = "image_tools.html.j2"
NUM_SHOWN, NUM_GROUPS = 100, 60
PURPOSES = ("check", "alike")


def checked(request: Request) -> Response:
    """Which images training skips, and the buckets of the others."""
    from lora_rocm.ui.image_set.checking import check_folder

    reading = reading_for(request)
    return _worked(request, "check", lambda work: check_folder(reading, work.advance))


def alike(request: Request) -> Response:
    """The images that occur twice."""
    from lora_rocm.ui.image_set.lookalikes import alike_images

    listing, resolve = listing_for(request), context_of(request).folders.resolve
    return _worked(request, "alike", lambda work: alike_images(listing, resolve, work.advance))


def cancel(request: Request) -> Response:
    """Cancel the search of ``purpose``."""
    purpose = query_of(request, "purpose")
    work = context_of(request).background.of(_key(request, purpose if purpose in PURPOSES else PURPOSES[0]))
    if work is not None:
        work.cancel()
    return Response(status_code=204)


def _worked(request: Request, purpose: str, function: Callable[[Work], object]) -> Response:
    """Show the result of a search, or its progress. It begins if there is none, or again if the user wants."""
    ui, key = context_of(request), _key(request, purpose)
    work = ui.background.of(key)
    if work is None or ("again" in request.query_params and work.status != "running"):
        work = ui.background.start(key, function)
        work.wait(0.6)
    return fragment(
        request,
        TEMPLATE,
        purpose,
        work=work,
        key=key,
        purpose=purpose,
        here=here(request),
        num_shown=NUM_SHOWN,
        num_groups=NUM_GROUPS,
    )


def _key(request: Request, purpose: str) -> str:
    reading = reading_for(request)
    return work_key(f"{reading.folder}|{reading.data.model_dump_json()}", purpose)


ROUTES = [
    Route("/images/checked", checked),
    Route("/images/alike", alike),
    Route("/images/checks/cancel", cancel, methods=["POST"]),
]
