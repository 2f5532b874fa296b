"""Pages and their pieces, rendered from ``templates/*.html.j2``. Only templates write markup, and escape every text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from lora_rocm.commands.output import Failure
from lora_rocm.errors import LoraRocmError, MachineError, StoppedError, UserError
from lora_rocm.page_parts.rendering import legible_value, new_environment
from lora_rocm.ui.context import context_of
from lora_rocm.ui.edits import EditConflict

TEMPLATES = Path(__file__).with_name("templates")
STATUS_OF = {
    "outside-folders": 403,
    "no-run": 404,
    "no-folder": 404,
    "no-recipe": 404,
    "no-image": 404,
    "edit-conflict": 409,
    "page-missing": 404,
}
"""HTTP status of errors by code; other errors have the status of their branch."""


def url(path: str, **query: object) -> str:
    """Return an address of this server. Values of the query are quoted; None is omitted."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    made = new_environment(TEMPLATES, legible_value)
    made.globals["url"] = url
    return made


def page(request: Request, template: str, http_status: int = 200, **values: object) -> HTMLResponse:
    """Return a whole page. The template extends ``base.html.j2``."""
    text = environment().get_template(template).render(_common(request, values))
    return HTMLResponse(text, http_status, headers={"vary": "HX-Request"})


def fragment(request: Request, template: str, block: str, http_status: int = 200, **values: object) -> Response:
    """Return one block of a template, to replace a piece of a page.

    If the browser itself sends the fields, because scripts are off or not loaded yet, the answer is their page.
    """
    if request.method == "POST" and "x-csrf" not in request.headers and not is_fragment(request):
        return RedirectResponse(_sender(request), 303)
    found = environment().get_template(template)
    context = found.new_context(_common(request, values))
    return HTMLResponse("".join(found.blocks[block](context)), http_status)


def is_fragment(request: Request) -> bool:
    """Whether htmx asks for a piece of a page, so that a whole page would be wrong."""
    return request.headers.get("hx-request") == "true"


def _sender(request: Request) -> str:
    """Return path and query of the page that sent a request; the start page if the browser does not name it."""
    try:
        sender = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return "/"
    if sender.netloc != request.headers.get("host", "") or not sender.path.startswith("/"):
        return "/"
    return "/" + sender.path.lstrip("/") + (f"?{sender.query}" if sender.query else "")


def problem(request: Request, error: LoraRocmError) -> Response:
    """Return the box with an error, in the words of the command line.

    A piece of a page gets the box at its top, and the page keeps what the user has written.
    """
    status, failure = _status(error), Failure.of(error)
    conflict = error if isinstance(error, EditConflict) else None
    if not is_fragment(request):
        return page(request, "problem.html.j2", status, failure=failure, conflict=conflict, part=None)
    answer = fragment(request, "problem.html.j2", "box", status, failure=failure, conflict=conflict)
    answer.headers["HX-Retarget"] = request.headers.get("x-problem-target", "#problem")
    answer.headers["HX-Reswap"] = "innerHTML show:top"
    return answer


def _status(error: LoraRocmError) -> int:
    if error.code in STATUS_OF:
        return STATUS_OF[error.code]
    match error:
        case UserError():
            return 422
        case StoppedError():
            return 409
        case MachineError():
            return 503
    return 500


def _common(request: Request, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that every template may use."""
    ui = context_of(request)
    shared = {
        "csrf": ui.access.csrf,
        "parts": ui.parts,
        "part": _part(request),
        "folders": ui.folders,
        "live": None,
        "failure": None,
        "conflict": None,
    }
    return {**shared, **values}


def _part(request: Request) -> str | None:
    """Return the key of the part that the address belongs to."""
    path = request.url.path
    found = [part for part in context_of(request).parts if path == part.path or path.startswith(f"{part.path}/")]
    return max(found, key=lambda part: len(part.path)).key if found else None
