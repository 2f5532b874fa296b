"""Images: the folders with images, and one folder as a grid with captions that can be changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import DataError, UserError
from lora_rocm.page_parts.texts import t
from lora_rocm.ui.context import context_of
from lora_rocm.ui.edits import EditConflict
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.folders import MODELS
from lora_rocm.ui.rendering import fragment, page, url
from lora_rocm.ui.thumbnails import MEDIA_TYPE, SIDES_PX, thumbnail

if TYPE_CHECKING:
    from lora_rocm.ui.image_set.changes import ChangeJournal
    from lora_rocm.ui.image_set.choosing import ImageQuery
    from lora_rocm.ui.image_set.listing import ImageListing
    from lora_rocm.ui.image_set.reading import FolderReading

LIST, FOLDER = "images.html.j2", "image_folder.html.j2"
SETTINGS = ("dir", "recipe", "resolution", "trigger", "ext")
"""Values of an address that choose the folder, and how it is read."""
FILTERS = ("text", "tag", "only", "sort")
MAX_ROWS = 500
UNREADABLE = Path(__file__).parents[1] / "static" / "unreadable.svg"
"""The picture in place of an image that cannot be read."""


def start(request: Request) -> Response:
    """The page with the folders. They follow on their own, because finding them reads many folders."""
    from lora_rocm.dataset.sources.folders import TABLE_SUFFIXES

    return page(request, LIST, suffixes=TABLE_SUFFIXES)


def found(request: Request) -> Response:
    """The folders with images, and those that recipes name."""
    from lora_rocm.ui.image_set.found_folders import FoundFolder, folders_with_images
    from lora_rocm.ui.image_set.reading import image_folders, recipes_in

    folders = context_of(request).folders
    of_texts = list[str]()
    for recipe_path, recipe in recipes_in(folders.working):
        of_texts += [folders.name_of(recipe_path)] if recipe.spec.trains_on_texts else []
        for path in image_folders(recipe):
            if path is not None and path.is_dir():
                folders.add(path, "data")
    shown, of_models = dict[Path, FoundFolder](), [each.path for each in folders.named if each.reason == MODELS]
    for named in folders.named:
        if named.reason not in ("runs", MODELS):
            found_here = folders_with_images(named.path)
            shown |= {each.path: each for each in found_here if not any(map(each.path.is_relative_to, of_models))}
    listed = [(folders.name_of(each.path) or ".", each) for each in shown.values()]
    return fragment(request, LIST, "found", listed=listed, of_texts=of_texts)


def names(request: Request) -> Response:
    """The folders with images in the page's folder, as suggestions for a field."""
    from lora_rocm.ui.image_set.found_folders import folders_with_images

    folders = context_of(request).folders
    shown = [folders.name_of(each.path) or "." for each in folders_with_images(folders.working)]
    return fragment(request, LIST, "names", names=shown)


def cover(request: Request) -> Response:
    """The first image of a folder, for the list of folders."""
    ui = context_of(request)
    folder = ui.folders.resolve(query_of(request, "dir"))
    return picture(request, ui.folders.resolve(str(folder / query_of(request, "file"))))


async def open_folder(request: Request) -> Response:
    """Open a folder that the user names. If it is elsewhere, it becomes one of the folders that the page may show."""
    folders = context_of(request).folders
    named = Path(await text_of(request, "folder"))
    added = await run_in_threadpool(folders.add, named, "added")
    return RedirectResponse(url("/images/view", dir=folders.name_of(added.path)), 303)


def view(request: Request) -> Response:
    """The page of one folder. The grid asks for its images itself."""
    from lora_rocm.ui.image_set.reading import image_folders, recipes_in

    ui, reading = context_of(request), reading_for(request)
    recipes = [
        ui.folders.name_of(path) for path, recipe in recipes_in(ui.folders.working)
        if reading.folder in image_folders(recipe)
    ]  # fmt: skip
    journal = journal_of(request, reading.folder)
    return page(request, FOLDER, reading=reading, here=here(request), recipes=recipes, newest=journal.version)


def items(request: Request) -> Response:
    """A window of the chosen images as JSON, for the grid. A folder without images has no rows, and a note."""
    from lora_rocm.ui.image_set.choosing import CHOSEN

    choice = request.query_params.get("choice", "")
    start, count = whole_number(request, "start", 0), whole_number(request, "count", MAX_ROWS)
    try:
        listing = listing_for(request)
    except DataError as error:
        if error.code != "data-folder-empty":
            raise
        return JSONResponse({"choice": "", "total": 0, "start": 0, "rows": [], "note": t("images.empty_folder")})
    query = query_for(request, request.query_params)
    answer = CHOSEN.rows(listing, query, choice, start, count)
    return JSONResponse({**answer, "note": t("images_losses.no_run")} if query.lacks_losses else answer)


def thumb(request: Request) -> Response:
    """A small version of an image of the folder."""
    ui, listing = context_of(request), listing_for(request)
    return picture(request, ui.folders.resolve(str(listing.path(query_of(request, "name")))))


def picture(request: Request, path: Path) -> Response:
    """Return a small version of a file. With the file's version in the address, the browser never asks again."""
    try:
        content, version = thumbnail(path, whole_number(request, "side", SIDES_PX[1]))
    except UserError as error:
        if error.code not in ("image-unreadable", "no-image"):
            raise
        return FileResponse(UNREADABLE, media_type="image/svg+xml")  # a picture of this state
    lasting = "private, max-age=31536000, immutable" if "v" in request.query_params else "private, no-cache"
    headers = {"etag": f'"{version}"', "cache-control": lasting}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPE, headers=headers)


def item(request: Request) -> Response:
    """The editor of one image."""
    return _item(request, query_of(request, "name"))


async def save(request: Request) -> Response:
    """Save a caption file. If it has changed since, both versions are shown, and saving again replaces it."""
    fields = await fields_of(request)
    given = {name: str(fields.get(name) or "") for name in ("file", "text", "version")}
    return await run_in_threadpool(_save, request, given)


def _save(request: Request, given: Mapping[str, str]) -> Response:
    from lora_rocm.ui.image_set.saving import save_caption

    ui, listing, name = context_of(request), listing_for(request), query_of(request, "name")
    files = listing.caption(name).files or (listing.caption_file(name),)
    place = next((file for file in files if file.name == given["file"]), None)
    if place is None:
        fix = "Open the image again."
        raise UserError(
            "caption-file-unknown", "This is not a caption file of the image.", where=given["file"], fix=fix
        )
    path, version = ui.folders.resolve(str(place)), given["version"] or request.headers.get("if-match", "").strip('"')
    try:
        journal = journal_of(request, listing.reading.folder)
        save_caption(ui.edits, journal, listing, name, path, given["text"], version)
    except EditConflict as conflict:
        return _item(request, name, 409, conflict=conflict, mine=given["text"])
    return changed(request, _item(request, name, saved=True), name)


def again(request: Request) -> Response:
    """Read the folder again, although nothing seems to have changed."""
    from lora_rocm.ui.image_set.listing import LISTINGS

    LISTINGS.forget()
    return RedirectResponse(url("/images/view", **here(request)), 303)


def _item(request: Request, name: str, http_status: int = 200, **values: object) -> Response:
    from lora_rocm.ui.image_set.choosing import version_of
    from lora_rocm.ui.image_set.item import shown_image

    ui, listing = context_of(request), listing_for(request)
    shown = shown_image(ui.edits, ui.folders.resolve, listing, name, version_of(listing, name))
    given = {"conflict": None, "mine": "", "saved": False, **values}
    return fragment(request, FOLDER, "item", http_status, image=shown, here=here(request), **given)


# Shared with the other modules of this part.


def here(request: Request) -> dict[str, str]:
    """Return the values of an address that choose the folder, and how it is read."""
    return {name: value for name in SETTINGS if (value := request.query_params.get(name))}


def reading_for(request: Request) -> FolderReading:
    """Return how the folder of a request is read.

    Raises:
        UserError: outside-folders; or no-folder; or a value cannot be used.
        RecipeError: the recipe is wrong.
    """
    from lora_rocm.ui.image_set.reading import RESOLUTION, reading_by, reading_of

    folders, query = context_of(request).folders, request.query_params
    folder = folders.resolve(query_of(request, "dir"))
    if not folder.is_dir():
        fix = "It may have been moved or deleted. The page Images and texts shows the folders that exist."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    if query.get("recipe"):
        return reading_by(folders.resolve(query["recipe"]), folder)
    return reading_of(
        folder,
        resolution=whole_number(request, "resolution", RESOLUTION),
        trigger_word=query.get("trigger", ""),
        caption_extension=query.get("ext", ".txt"),
    )


def listing_for(request: Request) -> ImageListing:
    """Return the images of the folder of a request.

    Raises:
        DataError: the folder has no images.
    """
    from lora_rocm.ui.image_set.listing import LISTINGS

    return LISTINGS.of(reading_for(request))


def journal_of(request: Request, folder: Path) -> ChangeJournal:
    """Return the journal of changes of a folder."""
    from lora_rocm.ui.image_set.changes import ChangeJournal

    return ChangeJournal(context_of(request).edits, folder)


def query_for(request: Request, values: Mapping[str, object]) -> ImageQuery:
    """Return the choice of images in an address or in posted fields."""
    from lora_rocm.ui.image_set.choosing import ImageQuery
    from lora_rocm.ui.image_set.folder_losses import losses_of

    text, tag, only, sort, run = (str(values.get(name) or "").strip() for name in (*FILTERS, "run"))
    query = ImageQuery(text, tag, only, sort)
    if not query.needs_losses:
        return query
    return replace(query, losses=losses_of(context_of(request).folders, reading_for(request).folder, run))


def changed(request: Request, answer: Response, name: str = "") -> Response:
    """Announce to the page that the captions of one image have changed, or any captions, and the newest change."""
    detail = {"target": "body", "name": name, "newest": journal_of(request, reading_for(request).folder).version}
    answer.headers["HX-Trigger"] = json.dumps({"images:changed": detail})
    return answer


def whole_number(request: Request, name: str, default: int) -> int:
    """Return a whole number of the address. Anything else counts as the default."""
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= 9 else default


ROUTES = [
    Route("/images", start),
    Route("/images/found", found),
    Route("/images/cover", cover),
    Route("/images/open", open_folder, methods=["POST"]),
    Route("/images/view", view),
    Route("/images/names", names),
    Route("/images/items", items),
    Route("/images/thumb", thumb),
    Route("/images/item", item),
    Route("/images/caption", save, methods=["POST"]),
    Route("/images/again", again, methods=["POST"]),
]
