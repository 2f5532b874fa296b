"""Images: the editor of an image's mask and crop."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.ui.context import context_of
from lora_rocm.ui.edits import EditConflict
from lora_rocm.ui.fields import fields_of, query_of
from lora_rocm.ui.pages.images import here, journal_of, listing_for
from lora_rocm.ui.rendering import page, problem, url

TEMPLATE = "image_editor.html.j2"
SAVED = ("crop", "whole")
"""Changes of the crop that the page confirms. The tool for a crop stays chosen."""


def edit(request: Request) -> Response:
    """The editor of an image's mask and crop."""
    from lora_rocm.ui.image_set.choosing import version_of
    from lora_rocm.ui.image_set.crop_rows import opened_crop
    from lora_rocm.ui.image_set.mask_files import opened_mask

    ui, listing, name = context_of(request), listing_for(request), query_of(request, "name")
    names = list(listing.names)
    newest = journal_of(request, listing.reading.folder).version  # first: an undo of a change after it is refused
    following = names[names.index(name) + 1 :][:1] if name in names else []
    return page(
        request,
        TEMPLATE,
        name=name,
        here=here(request),
        folder=listing.reading.folder,
        size_wh=listing.size(name),
        version=version_of(listing, name),
        newest=newest,
        mask=opened_mask(ui.edits, ui.folders.resolve, listing, name),
        crop=opened_crop(ui.edits, ui.folders.resolve, listing, name),
        has_recipe=listing.reading.recipe is not None,
        following=following[0] if following else "",
        saved=saved if (saved := request.query_params.get("saved")) in SAVED else "",
    )


def mask(request: Request) -> Response:
    """The mask of an image as a grey picture; white if there is none."""
    from lora_rocm.ui.image_set.mask_files import mask_picture, opened_mask

    ui, listing = context_of(request), listing_for(request)
    found = opened_mask(ui.edits, ui.folders.resolve, listing, query_of(request, "name"))
    return Response(mask_picture(ui.edits, found), media_type="image/png", headers={"cache-control": "no-store"})


async def save_mask(request: Request) -> Response:
    """Save the mask that the editor painted, or delete it if no picture is sent."""
    fields = await fields_of(request)
    given = fields.get("mask")
    content = await given.read() if isinstance(given, UploadFile) else None
    await fields.close()
    return await run_in_threadpool(_save_mask, request, content, str(fields.get("version") or ""))


def _save_mask(request: Request, content: bytes | None, version: str) -> Response:
    from lora_rocm.ui.image_set.mask_files import save_mask as save

    ui, listing, name = context_of(request), listing_for(request), query_of(request, "name")
    journal = journal_of(request, listing.reading.folder)
    try:
        save(ui.edits, ui.folders.resolve, journal, listing, name, content, version)
    except EditConflict as conflict:
        fix = "The other mask is shown below. Save again to replace it, or reload this page to continue with it."
        error = UserError("edit-conflict", conflict.what, where=str(conflict.path), fix=fix)
        answer = problem(request, error)
        answer.headers["x-version"] = conflict.version
        return answer
    return RedirectResponse(url("/images/edit", name=name, **here(request)), 303)


async def save_crop(request: Request) -> Response:
    """Save the crop of an image, or remove it."""
    fields = await fields_of(request)
    return await run_in_threadpool(_save_crop, request, fields)


def _save_crop(request: Request, fields: FormData) -> Response:
    from lora_rocm.ui.image_set.crop_rows import save_crop as save

    ui, listing, name = context_of(request), listing_for(request), query_of(request, "name")
    texts = [str(fields.get(side) or "") for side in ("left", "top", "width", "height")]
    removes = "remove" in fields
    if not removes and not all(text.isdecimal() and text.isascii() and len(text) < 9 for text in texts):
        fix = "Write whole numbers of pixels."
        raise UserError("crop-outside", "These are not four whole numbers.", where=", ".join(texts)[:80], fix=fix)
    left, top, width, height = (0, 0, 0, 0) if removes else map(int, texts)
    crop = None if removes else (left, top, width, height)
    journal = journal_of(request, listing.reading.folder)
    save(ui.edits, ui.folders.resolve, journal, listing, name, crop, str(fields.get("version") or ""))
    saved = "whole" if removes else "crop"
    return RedirectResponse(url("/images/edit", name=name, saved=saved, **here(request)) + "#crop-title", 303)


ROUTES = [
    Route("/images/edit", edit),
    Route("/images/mask", mask),
    Route("/images/mask", save_mask, methods=["POST"]),
    Route("/images/crop", save_crop, methods=["POST"]),
]
