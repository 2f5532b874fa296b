"""Images: the loss of each image in a run that trained the folder."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of
from lora_rocm.ui.pages.images import here, listing_for, reading_for
from lora_rocm.ui.rendering import fragment

TEMPLATE = "image_losses.html.j2"


def runs(request: Request) -> Response:
    """The field with the runs that trained the folder; nothing if there are none."""
    from lora_rocm.ui.image_set.folder_losses import runs_of

    folders = context_of(request).folders
    found = [folders.name_of(run_dir.path) for run_dir, _ in runs_of(folders, reading_for(request).folder)]
    return fragment(request, TEMPLATE, "runs", runs=found)


def loss(request: Request) -> Response:
    """The loss of one image: its figures, its curve and possible causes, or how often it was trained so far."""
    from lora_rocm.recipe.sections import caption_endings
    from lora_rocm.report.image_losses import LEAST_VISITS
    from lora_rocm.ui.image_set.folder_losses import losses_of

    folders, listing, name = context_of(request).folders, listing_for(request), query_of(request, "name")
    listing.path(name)
    found = losses_of(folders, listing.reading.folder, request.query_params.get("run", ""))
    is_judged = found is not None and name in found.judged
    return fragment(
        request,
        TEMPLATE,
        "loss",
        here=here(request),
        losses=found,
        run=folders.name_of(found.run_dir.path) if found else "",
        visits=found.visits(name) if found else 0,
        least=LEAST_VISITS,
        loss=found.hinted(name, listing.root, caption_endings(listing.reading.options.caption_extension))
        if found and is_judged
        else None,
        chart=found.chart(name) if found and is_judged else None,
    )


ROUTES = [Route("/images/loss-runs", runs), Route("/images/loss", loss)]
