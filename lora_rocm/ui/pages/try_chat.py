"""Try for language models: a chat with two sides, the model with a run's LoRA and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, number_of, query_of, whole_number_of
from lora_rocm.ui.free_gpu import running_runs
from lora_rocm.ui.rendering import fragment, is_fragment, page, url

if TYPE_CHECKING:
    from lora_rocm.commands.chat_records import Exchange
    from lora_rocm.commands.chat_session import Options
    from lora_rocm.ui.chat_host import ChatState

VIEW = "try_chat.html.j2"
NUM_SHOWN = 20
FIELDS = ("strength", "temperature", "top_p", "max_tokens", "seed")


@dataclass(frozen=True)
class ShownChat:
    """An earlier conversation in the list. title: its first prompt."""

    name: str
    title: str
    count: int
    updates: int


class TalkValues(TypedDict):
    """The values of the conversation's piece of the page.

    Attributes:
        name: the run, as requests call it.
        state: the state of the server's chat.
        is_here: whether the open conversation is the run's.
        exchanges: its prompts, if it is.
        elsewhere: the other run, if it is not.
        listed: the run's earlier conversations.
        sides: names of the sides.
    """

    name: str
    state: ChatState
    is_here: bool
    exchanges: Sequence[Exchange]
    elsewhere: str | None
    listed: Sequence[ShownChat]
    sides: Sequence[str]


def chat_page(request: Request, run_dir: RunDir) -> Response:
    """The page of a run with a language model. Values in the address fill the fields."""
    from lora_rocm.commands.chat_session import Options

    usual, given = Options(), request.query_params
    values = {name: given.get(name, f"{getattr(usual, name):g}") for name in FIELDS}
    values |= {name: given.get(name, "") for name in ("prompt", "system")}
    state = context_of(request).chat.state()
    is_open = state.run_dir == run_dir and state.record is not None
    values["file"] = given.get("file", str(state.record.updates) if is_open and state.record else "0")
    return page(
        request,
        VIEW,
        title=run_dir.path.name,
        values=values,
        files=[step for step, _ in run_dir.checkpoint_loras()],
        is_busy=bool(running_runs(context_of(request).folders)),
        **_talk(request, run_dir),
    )


def _talk(request: Request, run_dir: RunDir) -> TalkValues:
    from lora_rocm.commands.chat_records import chats_of
    from lora_rocm.commands.chat_session import SIDES

    ui = context_of(request)
    state = ui.chat.state()
    is_here = state.run_dir == run_dir
    listed = [
        ShownChat(each.name, each.exchanges[0].prompt, len(each.exchanges), each.updates)
        for each in chats_of(run_dir, NUM_SHOWN)
    ]
    return TalkValues(
        name=ui.folders.name_of(run_dir.path),
        state=state,
        is_here=is_here,
        exchanges=state.record.exchanges if is_here and state.record is not None else (),
        elsewhere=None if is_here or state.run_dir is None else ui.folders.name_of(state.run_dir.path),
        listed=listed,
        sides=SIDES["both"],
    )


def talk(request: Request) -> Response:
    """The conversation, again."""
    return fragment(request, VIEW, "talk", **_talk(request, _run(request)))


def text(request: Request) -> Response:
    """The answers that are being written."""
    return fragment(request, VIEW, "text", **_talk(request, _run(request)))


def chats(request: Request) -> Response:
    """The earlier conversations, again."""
    return fragment(request, VIEW, "chats", **_talk(request, _run(request)))


async def send(request: Request) -> Response:
    """Send a prompt to both sides."""
    fields = await fields_of(request)
    given = {key: value for key, value in fields.items() if isinstance(value, str)}
    return await run_in_threadpool(_sent, request, given)


def _sent(request: Request, given: Mapping[str, str]) -> Response:
    from lora_rocm.commands.chat_records import require_sane

    run_dir, prompt = _run(request), given.get("prompt", "").strip()
    if not prompt:
        raise UserError("field-missing", "This field is empty.", where="prompt", fix="Write a message.")
    options, updates = _options(given), whole_number_of(given, "file")
    require_sane(prompt, options)
    context_of(request).chat.send(run_dir, _source(run_dir, updates), updates, prompt, options)
    return _answer(request, run_dir)


def _options(given: Mapping[str, str]) -> Options:
    from lora_rocm.commands.chat_session import Options

    return Options(
        system=given.get("system", "").strip(),
        temperature=number_of(given, "temperature"),
        top_p=number_of(given, "top_p"),
        max_tokens=whole_number_of(given, "max_tokens"),
        seed=whole_number_of(given, "seed"),
        strength=number_of(given, "strength"),
    )


def _source(run_dir: RunDir, updates: int) -> Path:
    from lora_rocm.commands.tries import source_of

    return source_of(run_dir, updates)


def stop(request: Request) -> Response:
    """End the answers that are being written."""
    return _done(request, lambda run_dir: context_of(request).chat.stop())


def end(request: Request) -> Response:
    """End the process that keeps the model loaded."""
    return _done(request, lambda run_dir: context_of(request).chat.end())


def begin(request: Request) -> Response:
    """Begin a new conversation."""
    return _done(request, lambda run_dir: context_of(request).chat.begin())


def reopen(request: Request) -> Response:
    """Continue an earlier conversation. The page is loaded again, so that its fields name the conversation's file."""
    from lora_rocm.commands.chat_records import chat_named

    ui, run_dir = context_of(request), _run(request)
    record = chat_named(run_dir, query_of(request, "chat"))
    ui.chat.reopen(run_dir, record)
    address = url("/try/run", dir=ui.folders.name_of(run_dir.path), file=record.updates)
    if is_fragment(request):
        return Response(headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


def _done(request: Request, change: Callable[[RunDir], None]) -> Response:
    run_dir = _run(request)
    change(run_dir)
    return _answer(request, run_dir)


def _answer(request: Request, run_dir: RunDir) -> Response:
    if not is_fragment(request):
        return RedirectResponse(url("/try/run", dir=context_of(request).folders.name_of(run_dir.path)), 303)
    return fragment(request, VIEW, "talk", **_talk(request, run_dir))


def _run(request: Request) -> RunDir:
    return context_of(request).folders.run(query_of(request, "dir"))


ROUTES = [
    Route("/try/chat/talk", talk),
    Route("/try/chat/text", text),
    Route("/try/chat/list", chats),
    Route("/try/chat/send", send, methods=["POST"]),
    Route("/try/chat/stop", stop, methods=["POST"]),
    Route("/try/chat/end", end, methods=["POST"]),
    Route("/try/chat/begin", begin, methods=["POST"]),
    Route("/try/chat/reopen", reopen, methods=["POST"]),
]
