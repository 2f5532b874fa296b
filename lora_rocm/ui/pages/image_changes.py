"""Images: the table of tags, and changes of many captions at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of
from lora_rocm.ui.pages.images import changed, here, journal_of, listing_for, query_for, reading_for
from lora_rocm.ui.rendering import fragment

if TYPE_CHECKING:
    from lora_rocm.ui.image_set.caption_edits import CaptionEdit
    from lora_rocm.ui.image_set.listing import ImageListing

TEMPLATE = "image_tools.html.j2"
NUM_TAGS, NUM_EXAMPLES = 400, 5
SHORT_S = 0.6
"""Longest wait for a change, so that the page shows a short one as done at once."""


def tags(request: Request) -> Response:
    """The tags with the number of images that have them, and how many captions contain the trigger word."""
    from lora_rocm.recipe.trigger import has_words

    listing = listing_for(request)
    found, trigger = listing.tags(), (listing.reading.options.trigger_word or "").strip()
    with_trigger = sum(bool(trigger) and has_words(listing.caption(name).text, trigger) for name in listing.names)
    return fragment(
        request,
        TEMPLATE,
        "tags",
        here=here(request),
        tags=found.most_common(NUM_TAGS),
        num_tags=len(found),
        num_images=len(listing.names),
        trigger=trigger,
        with_trigger=with_trigger,
    )


async def preview(request: Request) -> Response:
    """The number of captions that a change would change, and the first of them."""
    fields = await fields_of(request)
    return await run_in_threadpool(_preview, request, fields)


def _preview(request: Request, fields: FormData) -> Response:
    from lora_rocm.ui.image_set.saving import differences

    listing = listing_for(request)
    edit, names = _edit(fields), _names(request, listing, fields)
    found = differences(listing, names, edit)
    first = list(islice(found, NUM_EXAMPLES))
    count = len(first) + sum(1 for _ in found)
    return fragment(request, TEMPLATE, "preview", first=first, count=count, num_names=len(names))


async def change(request: Request) -> Response:
    """Change captions in the background."""
    fields = await fields_of(request)
    return await run_in_threadpool(_change, request, fields)


def _change(request: Request, fields: FormData) -> Response:
    from lora_rocm.ui.image_set.saving import ManyChanged, change_many

    ui, listing = context_of(request), listing_for(request)
    edit, names = _edit(fields), _names(request, listing, fields)
    journal = journal_of(request, listing.reading.folder)

    def changes(work: Work) -> ManyChanged:
        return change_many(ui.edits, ui.folders.resolve, journal, listing, names, edit, work.advance)

    work = ui.background.start(work_key(listing.reading.folder), changes)
    work.wait(SHORT_S)
    return progress(request)


async def undo(request: Request) -> Response:
    """Undo the newest change in the folder, in the background. ``newest``: the one that the page shows."""
    newest = (await fields_of(request)).get("newest")
    return await run_in_threadpool(_undo, request, newest if isinstance(newest, str) else None)


def _undo(request: Request, newest: str | None) -> Response:
    from lora_rocm.ui.image_set.changes import Undone
    from lora_rocm.ui.image_set.listing import LISTINGS

    folder = reading_for(request).folder
    journal = journal_of(request, folder)
    journal.require_change(newest)

    def undoes(work: Work) -> Undone:
        try:
            return journal.undo(work.advance, newest)
        finally:
            LISTINGS.forget()

    context_of(request).background.start(work_key(folder), undoes).wait(SHORT_S)
    return progress(request)


def progress(request: Request) -> Response:
    """The newest change of many captions, or its undoing: the progress, or the result."""
    key = work_key(reading_for(request).folder)
    work = context_of(request).background.of(key)
    answer = fragment(request, TEMPLATE, "work", work=work, key=key, here=here(request))
    return answer if work is None or work.status == "running" else changed(request, answer)


def cancel(request: Request) -> Response:
    """Cancel the change. Captions that are changed already stay changed, and can be undone."""
    work = context_of(request).background.of(work_key(reading_for(request).folder))
    if work is not None:
        work.cancel()
    return progress(request)


def work_key(subject: object, purpose: str = "images") -> str:
    """Return the key of background work. ``subject``: the folder, and what else distinguishes it."""
    return f"{purpose}-{hashlib.sha256(str(subject).encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def _edit(fields: FormData) -> CaptionEdit:
    from lora_rocm.ui.image_set.caption_edits import CaptionEdit

    kind, find, put = (str(fields.get(name) or "") for name in ("kind", "find", "put"))
    return CaptionEdit(kind, find, put, match_case="match_case" in fields, whole_words="whole_words" in fields)


def _names(request: Request, listing: ImageListing, fields: FormData) -> Sequence[str]:
    """Return the images to change: those that are selected in the grid, or all that it shows.

    Raises:
        UserError: selection-invalid: the list of selected images cannot be read, or is empty.
    """
    if fields.get("scope") != "selected":
        return query_for(request, fields).chosen(listing)
    try:
        names = parse_json(str(fields.get("names") or "[]"))
    except BadJson:
        names = None
    if not isinstance(names, list) or not names:
        fix = "Select images in the grid, or choose all shown images."
        raise UserError("selection-invalid", "No image is selected.", where="names", fix=fix)
    known = set(listing.names)
    return [name for name in names if name in known]


ROUTES = [
    Route("/images/undo", undo, methods=["POST"]),
    Route("/images/tags", tags),
    Route("/images/preview", preview, methods=["POST"]),
    Route("/images/change", change, methods=["POST"]),
    Route("/images/progress", progress),
    Route("/images/cancel", cancel, methods=["POST"]),
]
