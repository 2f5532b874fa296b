"""Images: files that are chosen or dropped in the page, and new folders for them."""

from __future__ import annotations

from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.rendering import url


async def upload(request: Request) -> Response:
    """Save files in the folder. The answer names those that were saved, and why the others were not."""
    folder = _folder(request)
    fields = await fields_of(request)
    try:
        files = [each for each in fields.getlist("files") if isinstance(each, UploadFile)]
        return await run_in_threadpool(_received, folder, files)
    finally:
        await fields.close()


def _received(folder: Path, files: list[UploadFile]) -> Response:
    from lora_rocm.ui.image_set.uploads import receive

    found = receive(folder, [(each.filename or "", each.file) for each in files])
    return JSONResponse({"saved": found.saved, "refused": found.refused})


async def make_folder(request: Request) -> Response:
    """Make a folder for images in the page's own folder, and open it."""
    from lora_rocm.ui.image_set.uploads import new_folder

    folders = context_of(request).folders
    made = await run_in_threadpool(new_folder, folders.working, await text_of(request, "name"))
    return RedirectResponse(url("/images/view", dir=folders.name_of(made)), 303)


def _folder(request: Request) -> Path:
    folder = context_of(request).folders.resolve(query_of(request, "dir"))
    if not folder.is_dir():
        fix = "It may have been moved or deleted. The page Images and texts shows the folders that exist."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    return folder


ROUTES = [
    Route("/images/upload", upload, methods=["POST"]),
    Route("/images/new", make_folder, methods=["POST"]),
]
