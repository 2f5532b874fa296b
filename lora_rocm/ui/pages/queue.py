"""Queue: recipes in an order that are trained one after another, the present run, and the finished ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.commands.output import Failure
from lora_rocm.errors import UserError
from lora_rocm.foundation.files import refuse_link
from lora_rocm.page_parts.texts import t
from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.edits import EditConflict
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.part import Part
from lora_rocm.ui.queue_view import activity_of_queue, move, remove, shown_queue, undo_removal
from lora_rocm.ui.recipe_files import listed_recipes
from lora_rocm.ui.rendering import fragment, is_fragment, page

TEMPLATE = "queue.html.j2"
PLACES: Mapping[str, Callable[[int, int], int]] = {
    "first": lambda now, last: 1,
    "up": lambda now, last: now - 1,
    "down": lambda now, last: now + 1,
    "last": lambda now, last: last,
}


def queue(request: Request) -> Response:
    """The page."""
    ui = context_of(request)
    recipes, activity = listed_recipes(ui.folders), activity_of_queue(ui)
    return page(request, TEMPLATE, now=activity, queue=shown_queue(ui), recipes=recipes, report=None)


def now(request: Request) -> Response:
    """The activity of the queue, again."""
    return fragment(request, TEMPLATE, "now", now=activity_of_queue(context_of(request)))


def items(request: Request) -> Response:
    """The recipes in order and the finished ones, again."""
    return fragment(request, TEMPLATE, "items", queue=shown_queue(context_of(request)), report=None)


async def add(request: Request) -> Response:
    """Add recipes of the named folders to the end."""
    posted = (await fields_of(request)).getlist("recipe")
    return await run_in_threadpool(_add, request, [text for text in posted if isinstance(text, str)])


def _add(request: Request, names: list[str]) -> Response:
    from lora_rocm.commands.queue import add as add_recipes

    ui = context_of(request)
    if not names:
        raise UserError("field-missing", "No recipe is chosen.", where="recipe", fix="Choose at least one recipe.")
    added = add_recipes(ui.folders.queue, [str(ui.folders.resolve(name)) for name in names]).changed
    return _changed(request, t("queue.added", names=", ".join(added)))


async def moved(request: Request) -> Response:
    """Move a recipe: first, up, down or last."""
    file_name, version = await text_of(request, "file"), await text_of(request, "version")
    return await run_in_threadpool(_move, request, file_name, version, await text_of(request, "to"))


def _move(request: Request, file_name: str, version: str, to: str) -> Response:
    place = PLACES.get(to)
    if place is None:
        fix = f"Choose one of {', '.join(PLACES)}."
        raise UserError("queue-no-place", "There is no such place.", where=to[:100], fix=fix)
    found = QueueDir(context_of(request).folders.queue)
    name = found.present(file_name).name
    try:
        now_at = move(found, file_name, place, version)
    except EditConflict as conflict:
        return _refused(request, conflict, t("queue.not_moved", name=name), t("queue.not_moved_fix"))
    return _changed(request, t("queue.moved", name=name, place=now_at))


async def removed(request: Request) -> Response:
    """Remove a recipe. It can be undone."""
    return await run_in_threadpool(_remove, request, await text_of(request, "file"), await text_of(request, "version"))


def _remove(request: Request, file_name: str, version: str) -> Response:
    ui = context_of(request)
    found = QueueDir(ui.folders.queue)
    name = found.present(file_name).name
    try:
        edit = remove(found, ui.edits, file_name, version)
    except EditConflict as conflict:
        return _refused(request, conflict, t("queue.not_removed", name=name), t("queue.not_removed_fix"))
    return _changed(request, t("queue.removed", name=name), undo=edit.path.name)


async def undone(request: Request) -> Response:
    """Restore a recipe that was removed."""
    return await run_in_threadpool(_undo, request, await text_of(request, "file"))


def _undo(request: Request, file_name: str) -> Response:
    ui = context_of(request)
    found = QueueDir(ui.folders.queue)
    edit = undo_removal(found, ui.edits, file_name)
    return _changed(request, t("queue.restored", name=found.find(edit.path.name).name))


def recipe(request: Request) -> Response:
    """The text of a recipe in the queue, to be edited."""
    return _recipe(request, _item(context_of(request), query_of(request, "file")), "")


async def save(request: Request) -> Response:
    """Save the text of a recipe in the queue."""
    posted = await fields_of(request)
    text, version = posted.get("text"), await text_of(request, "version")
    return await run_in_threadpool(_save, request, text if isinstance(text, str) else "", version)


def _save(request: Request, text: str, version: str) -> Response:
    ui = context_of(request)
    found = QueueDir(ui.folders.queue)
    path = _item(ui, query_of(request, "file"))
    text = text.replace("\r\n", "\n")
    try:
        with found.editing():
            path = _item(ui, query_of(request, "file"))
            found.require_idle(found.present(path.name))
            ui.edits.save(path, text.encode("utf-8"), version)
    except EditConflict as conflict:
        if not is_fragment(request):
            raise
        values = {"file": path.name, "text": text, "version": conflict.version, "report": "", "conflict": conflict}
        return fragment(request, TEMPLATE, "recipe", 409, **values)
    answer = _recipe(request, path, t("queue.saved"))
    answer.headers["HX-Trigger"] = "queue-saved"  # its row has the version of the earlier text
    return answer


def run(request: Request) -> Response:
    """Run the queue in its own process, which continues what was interrupted."""
    ui = context_of(request)
    ui.launches.queue(ui.folders.queue, ui.folders.working)
    return _acted(request)


def stop(request: Request) -> Response:
    """Ask the queue to stop: the current run finishes its step and saves."""
    found = QueueDir(context_of(request).folders.queue)
    if found.is_run():
        found.ask_to_stop()
    return _acted(request)


def _item(ui: UiContext, file_name: str) -> Path:
    """Return the file of a recipe in the queue, also if it was moved since the page read its name.

    A link is refused, because it may lead out of the named folders.
    """
    path = QueueDir(ui.folders.queue).current_of(file_name).path
    refuse_link(path)
    return path


def _recipe(request: Request, path: Path, report: str) -> Response:
    content, version = context_of(request).edits.read(path)
    text = (content or b"").decode("utf-8", "replace")
    return fragment(request, TEMPLATE, "recipe", file=path.name, text=text, version=version, report=report)


def _acted(request: Request) -> Response:
    if not is_fragment(request):
        return RedirectResponse("/queue", 303)
    return fragment(request, TEMPLATE, "now", now=activity_of_queue(context_of(request)))


def _refused(request: Request, conflict: EditConflict, what: str, fix: str) -> Response:
    """Show the present queue, and why a change of an earlier state was refused."""
    error = UserError(conflict.code, what, where=conflict.where, fix=fix)
    if not is_fragment(request):
        raise error from conflict
    values = {"queue": shown_queue(context_of(request)), "report": "", "undo": "", "refused": Failure.of(error)}
    return fragment(request, TEMPLATE, "items", 409, **values)


def _changed(request: Request, report: str, undo: str = "") -> Response:
    """Show the queue after a change. report: a sentence. undo: the file that can be restored; or empty."""
    if not is_fragment(request):
        return RedirectResponse("/queue", 303)
    values = {"queue": shown_queue(context_of(request)), "report": report, "undo": undo, "refused": None}
    return fragment(request, TEMPLATE, "items", 200, **values)


PART = Part(
    "queue",
    "/queue",
    [
        Route("/queue", queue),
        Route("/queue/now", now),
        Route("/queue/items", items),
        Route("/queue/recipe", recipe),
        Route("/queue/add", add, methods=["POST"]),
        Route("/queue/move", moved, methods=["POST"]),
        Route("/queue/remove", removed, methods=["POST"]),
        Route("/queue/undo", undone, methods=["POST"]),
        Route("/queue/save", save, methods=["POST"]),
        Route("/queue/run", run, methods=["POST"]),
        Route("/queue/stop", stop, methods=["POST"]),
    ],
)
