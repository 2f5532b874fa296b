"""Recipe: the list, and one recipe as fields and as YAML. The file is the truth, and either may be edited."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.edits import MISSING
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.pages import recipe_check, recipe_models, recipe_new, recipe_plan, recipe_presets
from lora_rocm.ui.part import Part
from lora_rocm.ui.recipe_files import listed_recipes, named_file, recipe_path
from lora_rocm.ui.rendering import fragment, page, url

if TYPE_CHECKING:
    from lora_rocm.recipe.load import LoadedRecipe

LIST, EDITOR = "recipes.html.j2", "recipe.html.j2"
NEW_LINE, DOS_LINE = "\n", "\r\n"


def listed(request: Request) -> Response:
    """The list of recipes."""
    return page(request, LIST, recipes=listed_recipes(context_of(request).folders))


def edit(request: Request) -> Response:
    """One recipe, with its fields, its YAML, and the findings of ``check``."""
    from lora_rocm.recipe.presets import presets
    from lora_rocm.ui.recipe_draft import edited

    ui, path = context_of(request), _recipe(request)
    text, version = _text_of(ui, path)
    name = ui.folders.name_of(path)
    draft = edited(text, Path(name))
    return page(
        request,
        EDITOR,
        file=name,
        version=version,
        draft=draft,
        can_undo=ui.edits.can_undo(path),
        presets=presets(),
        images=_images_of(ui, draft.loaded),
    )


def _images_of(ui: UiContext, loaded: LoadedRecipe | None) -> list[str]:
    """Return the folders of images that a recipe names, as requests name them. The page may show them from now on."""
    from lora_rocm.ui.image_set.reading import image_folders

    folders = [] if loaded is None or loaded.recipe.spec.trains_on_texts else image_folders(loaded.recipe)
    there = [path for path in folders if path is not None and path.is_dir()]
    return [ui.folders.name_of(ui.folders.add(path, "data").path) or "." for path in there]


def present(request: Request) -> Response:
    """The present text of the file and its version: another program may have changed or deleted it."""
    ui, path = context_of(request), _recipe(request)
    if not path.exists():
        return JSONResponse({"text": "", "version": MISSING, "can_undo": False})
    text, version = _text_of(ui, path)
    return JSONResponse({"text": text, "version": version, "can_undo": ui.edits.can_undo(path)})


async def draft(request: Request) -> Response:
    """The problems of a text that is not saved yet, and the values of its fields.

    ``key`` and ``value``: a field that was changed. The answer has the text after that change.
    """
    posted = await fields_of(request)
    return await run_in_threadpool(_draft, request, _field(posted, "text"), posted.get("key"), _field(posted, "value"))


def _draft(request: Request, text: str, key: object, value: str) -> Response:
    from lora_rocm.ui.recipe_draft import edited

    name = Path(context_of(request).folders.name_of(_recipe(request)))
    found = edited(text, name)
    if isinstance(key, str) and key:
        found = edited(found.with_value(key, value.replace(DOS_LINE, NEW_LINE)), name)
    verdict = fragment(request, EDITOR, "verdict", draft=found)
    return JSONResponse(
        {
            "text": found.text,
            "values": found.values,
            "faults": found.faults,
            "shape": found.shape,
            "is_yaml": found.is_yaml,
            "is_valid": found.loaded is not None,
            "verdict": bytes(verdict.body).decode(),
        }
    )


async def fields(request: Request) -> Response:
    """The fields of a text that is not saved yet. They differ between families, adapters and optimizers."""
    from lora_rocm.ui.recipe_draft import edited

    text = _field(await fields_of(request), "text")
    name = Path(context_of(request).folders.name_of(_recipe(request)))
    found = await run_in_threadpool(edited, text, name)
    return fragment(request, EDITOR, "fields", draft=found)


async def save(request: Request) -> Response:
    """Write the text to the file, if it still has the version that the page got."""
    posted = await fields_of(request)
    return await run_in_threadpool(_save, request, _field(posted, "text"), _field(posted, "version"))


def _save(request: Request, text: str, version: str) -> Response:
    ui, path = context_of(request), _recipe(request)
    before, _ = ui.edits.read(path)
    text = text.replace(DOS_LINE, NEW_LINE)
    if before is not None and b"\r\n" in before:
        text = text.replace(NEW_LINE, DOS_LINE)
    if_match = request.headers.get("if-match", "").strip('"') or version or MISSING
    saved = ui.edits.save(path, text.encode(), if_match)
    return _changed(request, saved.version)


async def undo(request: Request) -> Response:
    """Take the newest saved change of the file back, if it is the one that the page shows."""
    version = _field(await fields_of(request), "version")
    return await run_in_threadpool(_undo, request, version)


def _undo(request: Request, version: str) -> Response:
    if_match = request.headers.get("if-match", "").strip('"') or version or None
    saved = context_of(request).edits.undo(_recipe(request), if_match)
    return _changed(request, saved.version)


async def copy(request: Request) -> Response:
    """Copy a recipe under another name."""
    name = await text_of(request, "name")
    return await run_in_threadpool(_copy, request, name)


def _copy(request: Request, name: str) -> Response:
    from lora_rocm.commands.new import require_new

    ui, path = context_of(request), _recipe(request)
    content, _ = ui.edits.read(path)
    target = ui.folders.resolve(named_file(name))
    require_new(target)
    ui.edits.save(target, content, MISSING)
    return RedirectResponse(url("/recipe/edit", file=ui.folders.name_of(target)), 303)


def _changed(request: Request, version: str) -> Response:
    """Return the answer to a saved change: the version for the page's script, or the page again without scripts."""
    ui, path = context_of(request), _recipe(request)
    if "if-match" not in request.headers:
        return RedirectResponse(url("/recipe/edit", file=ui.folders.name_of(path)), 303)
    text, _ = _text_of(ui, path)
    return JSONResponse({"version": version, "text": text, "can_undo": ui.edits.can_undo(path)})


def _recipe(request: Request) -> Path:
    """Return the recipe that the address names.

    Raises:
        UserError: outside-folders; or recipe-suffix: it is not a YAML file, so the page neither shows nor changes it.
    """
    return recipe_path(context_of(request).folders, query_of(request, "file"))


def _text_of(ui: UiContext, path: Path) -> tuple[str, str]:
    """Return text and version of a recipe.

    Raises:
        UserError: no-recipe: there is no such file, or it is not UTF-8 text.
    """
    content, version = ui.edits.read(path)
    if content is None:
        fix = "It may have been moved or deleted. The list of recipes shows those that exist."
        raise UserError("no-recipe", "There is no recipe here.", where=str(path), fix=fix)
    try:
        return content.decode("utf-8-sig").replace(DOS_LINE, NEW_LINE), version
    except UnicodeDecodeError:
        fix = "Save the file as UTF-8."
        raise UserError("no-recipe", "This file is not UTF-8 text.", where=str(path), fix=fix) from None


def _field(posted: FormData, name: str) -> str:
    value = posted.get(name)
    return value if isinstance(value, str) else ""


PART = Part(
    "recipe",
    "/recipe",
    [
        Route("/recipe", listed),
        Route("/recipe/edit", edit),
        Route("/recipe/present", present),
        Route("/recipe/draft", draft, methods=["POST"]),
        Route("/recipe/fields", fields, methods=["POST"]),
        Route("/recipe/save", save, methods=["POST"]),
        Route("/recipe/undo", undo, methods=["POST"]),
        Route("/recipe/copy", copy, methods=["POST"]),
        *recipe_new.ROUTES,
        *recipe_plan.ROUTES,
        *recipe_check.ROUTES,
        *recipe_models.ROUTES,
        *recipe_presets.ROUTES,
    ],
)
