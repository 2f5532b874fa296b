"""The chooser of a base model: what is on this machine, for the fields of a recipe that name a model."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.fields import query_of, text_of
from lora_rocm.ui.rendering import fragment

if TYPE_CHECKING:
    from lora_rocm.commands.base_candidates import ModelPlace, SeenBases

TEMPLATE = "model_picker.html.j2"
SHOWN, SAVED_AT = 60, 50
LISTED_S, READING_S = 20.0, 0.4
"""How long a list of names is used again, and how long one answer reads headers."""


def picker(request: Request) -> Response:
    """The chooser for a field: a search, the models, and the ways to get others."""
    key, family = _asked(request)
    return fragment(request, TEMPLATE, "picker", **_found(context_of(request), key, family, ""), words="")


def listed(request: Request) -> Response:
    """The models whose paths have some words. It asks again while there are headers to read."""
    key, family = _asked(request)
    words = query_of(request, "words")[:200]
    return fragment(request, TEMPLATE, "models", **_found(context_of(request), key, family, words), words=words)


async def add_folder(request: Request) -> Response:
    """Search another folder, which the user names."""
    folder = await text_of(request, "folder")
    return await run_in_threadpool(_add_folder, request, folder)


def _add_folder(request: Request, folder: str) -> Response:
    key, family = _asked(request)
    ui = context_of(request)
    ui.folders.add(Path(folder.strip()), "models")
    _listing.clear()
    return fragment(request, TEMPLATE, "models", **_found(ui, key, family, ""), words="")


def _asked(request: Request) -> tuple[str, str]:
    """Return key and family.

    Raises:
        UserError: field-unknown: the family has no such key; or the family is not known.
    """
    key, family = query_of(request, "key"), request.query_params.get("family", "")
    from lora_rocm.commands.base_candidates import base_keys

    specs = [FAMILIES[family]] if family in FAMILIES else [] if family else list(FAMILIES)
    if not any(key in base_keys(spec.model_section) for spec in specs):
        fix = "Reload the page: the recipe may be of another family now."
        raise UserError("field-unknown", "This recipe has no such field.", where=key[:200], fix=fix)
    return key, family


def _found(ui: UiContext, key: str, family: str, words: str) -> dict[str, object]:
    from lora_rocm.commands.base_candidates import candidates

    seen = _seen()
    found = candidates(_places(ui), seen, key, family, words, READING_S)
    seen.save(SAVED_AT if found.unread else 1)
    title = FAMILIES[family].title if family else ""
    return {"found": found, "shown": found.found[:SHOWN], "key": key, "family": family, "family_title": title}


@functools.cache
def _seen() -> SeenBases:
    """Return what the headers of models told, which is kept in a file of the user."""
    from lora_rocm.commands.base_candidates import SeenBases

    return SeenBases(own_app_dir() / "ui" / "seen_models.json")


_listing: dict[Sequence[Path], tuple[float, list[ModelPlace]]] = {}
_lock = threading.Lock()


def _places(ui: UiContext) -> list[ModelPlace]:
    """Return the names of the models. They are listed again after some seconds."""
    from lora_rocm.commands.base_candidates import model_places

    named = tuple(each.path for each in ui.folders.named if each.reason != "runs")
    with _lock:
        at_s, places = _listing.get(named, (0.0, []))
        if not at_s or time.monotonic() - at_s > LISTED_S:
            around = [ui.folders.working, ui.folders.working.parent]
            places = model_places(Path.home(), around, named)
            _listing.clear()
            _listing[named] = (time.monotonic(), places)
    return places


ROUTES = [
    Route("/recipe/models", picker),
    Route("/recipe/models/listed", listed),
    Route("/recipe/models/folder", add_folder, methods=["POST"]),
]
