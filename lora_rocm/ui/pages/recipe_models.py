"""The chooser of a base model among those on this machine, for the fields of a recipe that name a model."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.fields import query_of, text_of
from lora_rocm.ui.folders import MODELS
from lora_rocm.ui.rendering import fragment

if TYPE_CHECKING:
    from lora_rocm.commands.base_candidates import ModelPlace, SeenBases

TEMPLATE = "model_picker.html.j2"
SHOWN, SAVED_AT = 60, 50
LISTED_S, READING_S, ANSWER_S = 20.0, 0.4, 0.3
"""Time for which a list of names is used again, in which one answer reads headers, and for which it waits for work."""
OFFER, DOWNLOAD, MAX_REPO_LETTERS = "hub-offer-", "hub-download-", 200


def picker(request: Request) -> Response:
    """The chooser for a field: a search, the models, another folder, and a download."""
    key, family = _asked(request)
    return _shown(request, "picker", key, family, "")


def listed(request: Request) -> Response:
    """The models with some words in their paths. It asks again while there are headers to read."""
    key, family = _asked(request)
    words = request.query_params.get("words", "")[:200]
    return _shown(request, "models", key, family, words)


async def add_folder(request: Request) -> Response:
    """Search another folder, which the user names."""
    folder = await text_of(request, "folder")  # outside: models are searched there from now on
    return await run_in_threadpool(_add_folder, request, folder)


def _add_folder(request: Request, folder: str) -> Response:
    key, family = _asked(request)
    context_of(request).folders.add(Path(folder.strip()), MODELS)
    _listing.clear()
    return _shown(request, "models", key, family, "")


def _asked(request: Request) -> tuple[str, str]:
    """Return key and family.

    Raises:
        UserError: field-unknown: the family has no such key; or the family is not known.
    """
    from lora_rocm.commands.base_candidates import base_keys

    key, family = query_of(request, "key"), request.query_params.get("family", "")
    specs = [FAMILIES[family]] if family in FAMILIES else [] if family else list(FAMILIES)
    if not any(key in base_keys(spec.model_section) for spec in specs):
        fix = "Reload the page: the recipe may be of another family now."
        raise UserError("field-unknown", "This recipe has no such field.", where=key[:200], fix=fix)
    return key, family


def _shown(request: Request, block: str, key: str, family: str, words: str) -> Response:
    """Return a block of the chooser with the models that have these words in their paths."""
    from lora_rocm.commands.base_candidates import candidates, shipped_places

    seen = _seen()
    tiny = shipped_places() if key == "name_or_path" else []  # whole models, not their parts
    shipped = [each for each in tiny if not family or family in seen.read(each).families]
    found = candidates([*_places(context_of(request)), *shipped], seen, key, family, words, READING_S)
    seen.save(SAVED_AT if found.unread else 1)
    title, shown = FAMILIES[family].title if family else "", found.found[:SHOWN]
    return fragment(
        request,
        TEMPLATE,
        block,
        found=found,
        shown=shown,
        key=key,
        family=family,
        family_title=title,
        words=words,
    )


# Downloads


def offer(request: Request) -> Response:
    """Files, size and terms of a model of the hub. The hub is asked in the background."""
    from lora_rocm.commands.hub_download import offered

    repo = query_of(request, "repo").strip()[:MAX_REPO_LETTERS]
    ui = context_of(request)
    work = _work(ui, OFFER + _digest(repo), lambda work: offered(repo), again=not request.query_params.get("look"))
    return fragment(request, TEMPLATE, "offer", work=work, repo=repo)


def download(request: Request) -> Response:
    """Begin a download that was offered. It goes on if the page is closed, but not without the server."""
    from lora_rocm.commands.hub_download import download_base

    repo, ui = query_of(request, "repo"), context_of(request)
    asked = ui.background.of(OFFER + _digest(repo))
    found = asked.result if asked is not None else None
    if found is None:
        fix = "Ask for its size and terms again."
        raise UserError("work-unknown", "This model was not asked for.", where=repo[:MAX_REPO_LETTERS], fix=fix)

    def fetch(work: Work) -> Path:
        work.done, work.total = found.num_bytes - found.missing_bytes, found.num_bytes
        folder = download_base(found, work.advance)
        _listing.clear()
        return folder

    work = _work(ui, DOWNLOAD + _digest(repo), fetch, again=True)
    return fragment(request, TEMPLATE, "download", work=work, repo=repo)


def download_state(request: Request) -> Response:
    """The progress of a download."""
    repo = query_of(request, "repo")
    work = context_of(request).background.of(DOWNLOAD + _digest(repo))
    if work is None:
        fix = "Ask for its size and terms again."
        raise UserError("work-unknown", "This is not being done.", where=repo[:MAX_REPO_LETTERS], fix=fix)
    return fragment(request, TEMPLATE, "download", work=work, repo=repo)


def cancel(request: Request) -> Response:
    """Cancel a download. Its complete files stay in the cache of the hub."""
    work = context_of(request).background.of(DOWNLOAD + _digest(query_of(request, "repo")))
    if work is not None:
        work.cancel()
    return Response(status_code=204)


def _work(ui: UiContext, key: str, function: Callable[[Work], object], *, again: bool) -> Work:
    """Return the work with this key. Begin it if there is none, and with ``again`` also if it has ended."""
    work = ui.background.of(key)
    if work is None or (again and work.status != "running"):
        work = ui.background.start(key, function)
    work.wait(ANSWER_S)
    return work


def _digest(repo: str) -> str:
    return hashlib.sha256(repo.encode("utf-8", "replace")).hexdigest()[:16]


@functools.cache
def _seen() -> SeenBases:
    """Return the descriptions of models, which are kept in a file of the user."""
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
    Route("/recipe/models/offer", offer),
    Route("/recipe/models/download", download, methods=["POST"]),
    Route("/recipe/models/download/state", download_state),
    Route("/recipe/models/download/cancel", cancel, methods=["POST"]),
]
