"""Presets: named sets of keys, shown as a difference to the present text before they are applied to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, query_of
from lora_rocm.ui.recipe_files import recipe_path
from lora_rocm.ui.rendering import fragment

if TYPE_CHECKING:
    from lora_rocm.recipe.presets import Preset, PresetChange

EDITOR = "recipe.html.j2"


async def preset(request: Request) -> Response:
    """The changes of a preset in a text that is not saved yet."""
    return await run_in_threadpool(_preset, request, *await _asked(request))


def _preset(request: Request, text: str, name: str) -> Response:
    chosen, changes = _changes(request, text, name)
    return fragment(request, EDITOR, "preset", preset=chosen, changes=changes)


async def apply(request: Request) -> Response:
    """The text after a preset. Comments and other lines stay, and nothing is saved."""
    return await run_in_threadpool(_apply, request, *await _asked(request))


def _apply(request: Request, text: str, name: str) -> Response:
    from lora_rocm.recipe.presets import applied

    _, changes = _changes(request, text, name)
    return JSONResponse({"text": applied(text.replace("\r\n", "\n"), changes)})


def _changes(request: Request, text: str, name: str) -> tuple[Preset, tuple[PresetChange, ...]]:
    """Return a preset and its changes.

    Raises:
        RecipeError: the text is not a valid recipe.
        UserError: no-preset.
    """
    from lora_rocm.recipe.load import load_text
    from lora_rocm.recipe.presets import preset_changes, preset_named

    folders, chosen = context_of(request).folders, preset_named(name)
    loaded = load_text(text, Path(folders.name_of(recipe_path(folders, query_of(request, "file")))))
    if loaded.recipe.spec.trains_on_texts and chosen.purpose_of_texts:
        chosen = replace(chosen, purpose=chosen.purpose_of_texts)
    return chosen, preset_changes(chosen, loaded.recipe)


async def _asked(request: Request) -> tuple[str, str]:
    posted = await fields_of(request)
    text, name = posted.get("text"), posted.get("preset")
    return text if isinstance(text, str) else "", name if isinstance(name, str) else ""


ROUTES = [
    Route("/recipe/preset", preset, methods=["POST"]),
    Route("/recipe/preset/apply", apply, methods=["POST"]),
]
