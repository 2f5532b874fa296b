"""New recipes: from a shipped one, filled in for images and a model, or from another trainer's configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.names import usable_stem
from lora_rocm.page_parts.texts import t
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.edits import MISSING
from lora_rocm.ui.fields import fields_of, query_of
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.recipe_files import named_file
from lora_rocm.ui.rendering import fragment, is_fragment, page, url

if TYPE_CHECKING:
    from lora_rocm.commands.import_config import ImportResult

NEW = "recipe_new.html.j2"
MAX_NAMES = 100
MAX_UPLOADS, MAX_FILE_BYTES = 16, 4 << 20
"""Number and size of the files of another trainer that can be dropped."""


def choices(request: Request) -> Response:
    """Two kinds of new recipes, from a shipped recipe, or from another trainer."""
    from lora_rocm.commands.new import recipes
    from lora_rocm.recipe.presets import presets

    query, of_texts = request.query_params, _families_of_texts()
    images, texts = query.get("images", ""), query.get("texts", "")
    kind = "images" if images else "texts" if texts or query.get("kind") == "texts" else query.get("kind", "")
    shipped = recipes().recipes
    if kind in ("images", "texts"):
        shipped = tuple(each for each in shipped if (each.family in of_texts) == (kind == "texts"))
    family = of_texts[0] if kind == "texts" and len(of_texts) == 1 else ""
    name = _proposed_name(context_of(request).folders, images or texts)
    return page(
        request,
        NEW,
        shipped=shipped,
        presets=presets(),
        images=images,
        texts=texts,
        kind=kind,
        family=family,
        name=name,
    )


def _proposed_name(folders: Folders, data: str) -> str:
    """Return a name for a recipe from its folder or table, with a number if it is taken; empty if there is none."""
    from lora_rocm.dataset.sources.folders import TABLE_SUFFIXES

    path = Path(data)
    stem = usable_stem(path.stem if path.suffix.lower() in TABLE_SUFFIXES else path.name) if data else ""
    names = (stem, *(f"{stem}-{number}" for number in range(2, MAX_NAMES)))
    return next((name for name in names if stem and not os.path.lexists(folders.working / named_file(name))), "")


def _families_of_texts() -> list[str]:
    from lora_rocm.families.registry import FAMILIES

    return [spec.name for spec in FAMILIES if spec.trains_on_texts]


async def new(request: Request) -> Response:
    """Start ``lora-rocm new``: it inspects the model in a child process and reads the headers of all images."""
    posted = await fields_of(request)
    return await run_in_threadpool(_new, request, posted)


def _new(request: Request, posted: FormData) -> Response:
    from lora_rocm.commands import new as command

    # Check what was given, before anything is computed
    ui = context_of(request)
    given = {name: _given(posted, name) for name in ("source", "images", "texts", "model", "card", "preset")}
    path = ui.folders.resolve(named_file(_required(posted, "name")))
    command.require_new(path)
    if given["source"] is None and given["model"] is None:
        fix = "Choose a recipe to copy, or name the base model: its usual recipe is taken then."
        raise UserError(
            "recipe-unnamed", "It is not clear which recipe to copy.", where=t("recipe_new.source"), fix=fix
        )
    if (images := given["images"]) is not None:
        ui.folders.add(Path(images), "data")
    if (texts := given["texts"]) is not None and Path(texts).expanduser().is_dir():
        ui.folders.add(Path(texts), "data")
    wanted = command.NewRequest(path, **given)
    # Compute it in the background

    def work(work: Work) -> command.NewResult:
        def notify(text: str) -> None:
            work.report(text)
            work.require_wanted()

        try:
            made = command.new(wanted, notify=notify)
            return dataclasses.replace(made, notices=tuple(map(_in_words, made.notices)))
        except LoraRocmError as error:
            error.where, error.fix = _in_words(error.where), _in_words(error.fix)
            raise

    key = f"recipe-new-{hashlib.sha256(str(path).encode('utf-8', 'replace')).hexdigest()[:12]}"
    ui.background.start(key, work)
    return _led_to(request, url("/recipe/new/made", work=key))


def _in_words(text: str) -> str:
    """Return a text of the command with the names of the page's fields in place of options, which nobody typed here."""
    fields = {
        "from": t("recipe_new.source"),
        "images": t("recipe_new.images"),
        "texts": t("recipe_new.texts"),
        "model": t("recipe_new.model"),
        "card": t("recipe_new.card"),
        "preset": t("recipe_new.preset"),
    }
    return re.sub(rf"--({'|'.join(fields)})\b", lambda option: f'"{fields[option[1]]}"', text)


def made(request: Request) -> Response:
    """The progress of a new recipe, and the values that were filled in, with the reasons."""
    key = query_of(request, "work")
    work = context_of(request).background.of(key) if key.startswith("recipe-new-") else None
    if work is None:
        fix = "Begin again on the page Recipe."
        raise UserError("work-unknown", "This is not being done.", where=key[:100], fix=fix)
    file = None if work.result is None else context_of(request).folders.name_of(work.result.recipe)
    if is_fragment(request):
        return fragment(request, NEW, "made", work=work, key=key, file=file)
    return page(request, NEW, work=work, key=key, file=file, shipped=())


def cancel(request: Request) -> Response:
    """Cancel a new recipe. No file is written."""
    key = query_of(request, "work")
    work = context_of(request).background.of(key) if key.startswith("recipe-new-") else None
    if work is not None:
        work.cancel()
    return Response(status_code=204)


async def import_files(request: Request) -> Response:
    """Translate the dropped files of another trainer, and save the recipe under a new name."""
    posted = await fields_of(request)
    try:
        files = [value for value in posted.getlist("files") if isinstance(value, UploadFile) and value.filename]
        if not 0 < len(files) <= MAX_UPLOADS:
            fix = f"Choose the main configuration and the files that it names, at most {MAX_UPLOADS}."
            raise UserError("no-upload", "There is no file to import.", where="files", fix=fix)
        contents = [await _content(file) for file in files]
    finally:
        await posted.close()
    return await run_in_threadpool(_import, request, contents, _given(posted, "name"))


async def _content(file: UploadFile) -> tuple[str, bytes]:
    """Return name and content of a dropped file.

    Raises:
        UserError: upload-refused.
    """
    content = await file.read(MAX_FILE_BYTES + 1)
    name = PurePath((file.filename or "").replace("\\", "/")).name
    if len(content) > MAX_FILE_BYTES:
        what = f"This file is larger than {MAX_FILE_BYTES >> 20} MiB, so it is not a configuration."
        raise UserError("upload-refused", what, where=name, fix="Choose the configuration file.")
    return name, content


def _import(request: Request, contents: Sequence[tuple[str, bytes]], name: str | None) -> Response:
    from lora_rocm.commands.new import require_new

    ui = context_of(request)
    path = ui.folders.resolve(named_file(name or f"imported-{PurePath(contents[0][0]).stem}"))
    require_new(path)
    found = _translated(contents)
    ui.edits.save(path, found.recipe.encode(), MISSING)
    return fragment(request, NEW, "imported", found=found, file=ui.folders.name_of(path))


def _translated(contents: Sequence[tuple[str, bytes]]) -> ImportResult:
    """Translate files that were dropped. Messages name them as the user does."""
    from lora_rocm.commands.import_config import import_config
    from lora_rocm.foundation.files import temporary_folder, write_atomic

    with temporary_folder() as folder:
        paths = []
        for number, (name, content) in enumerate(contents):
            suffix = PurePath(name).suffix
            path = (
                folder / f"{usable_stem(PurePath(name).stem) or f'file-{number}'}{suffix if suffix.isascii() else ''}"
            )
            paths.append(path if path not in paths else path.with_stem(f"{path.stem}-{number}"))
            write_atomic(paths[-1], content, read_back=False)
        try:
            found = import_config(paths, (), None)
        except UserError as error:
            where = error.where.replace(f"{folder}{os.sep}", "")
            raise UserError(error.code, error.what, where=where, fix=error.fix) from None
        here = f"{folder}{os.sep}"

    def plain(text: str) -> str:
        return text.replace(here, "")

    return dataclasses.replace(
        found,
        recipe=plain(found.recipe),
        settings=tuple(dataclasses.replace(row, where=plain(row.where)) for row in found.settings),
        unread=tuple(dataclasses.replace(part, where=plain(part.where), why=plain(part.why)) for part in found.unread),
        notices=tuple(map(plain, found.notices)),
    )


def _given(posted: FormData, name: str) -> str | None:
    value = posted.get(name)
    return value.strip() if isinstance(value, str) and value.strip() else None


def _required(posted: FormData, name: str) -> str:
    value = _given(posted, name)
    if value is None:
        raise UserError("field-missing", "This field is empty.", where=name, fix="Fill it in.")
    return value


def _led_to(request: Request, address: str) -> Response:
    """Lead the browser to another page, with and without htmx."""
    if is_fragment(request):
        return Response(status_code=200, headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


ROUTES = [
    Route("/recipe/new", choices, methods=["GET"]),
    Route("/recipe/new/start", new, methods=["POST"]),
    Route("/recipe/new/made", made),
    Route("/recipe/new/cancel", cancel, methods=["POST"]),
    Route("/recipe/import", import_files, methods=["POST"]),
]
