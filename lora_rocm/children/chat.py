"""Child process of ``lora-rocm chat``: answers prompts with the base model and with its adapter, token by token.

It reads requests (``jobs.ChatRequest``) from standard input, one per line, and emits the generated text as events.
It ends when standard input closes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lora_rocm.adapters.attach import attach_file
from lora_rocm.dataset.rows.records import ANSWERS, UnusableText
from lora_rocm.device.allocator import LimitFollower
from lora_rocm.device.precision import compute_dtype
from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.families.base import Answering, Sampling, family_for
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.processes.jobs import AskRequest, ChatJob, ChatRequest, ResetRequest, StopRequest, chat_request
from lora_rocm.rundir.event_types import AnsweredEvent, Emit, NoticeEvent, ReadyEvent, WrittenEvent
from lora_rocm.rundir.events import emit as to_output
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.run_recipe import recipe_of_run
from lora_rocm.train.base_seal import require_trained_base
from lora_rocm.train.checkpoint import latest_valid
from lora_rocm.train.standalone import open_placement, start_device

BASE, ADAPTER = "base", "adapter"


class Requests(Protocol):
    """The source of requests from the parent process."""

    def next(self) -> ChatRequest | None:
        """Wait for the next request and return it; None if standard input has closed.

        Raises:
            MachineError: job-unreadable.
        """
        ...

    @property
    def stopped(self) -> bool:
        """Whether the parent wants the current answer to end."""
        ...


class InputRequests:
    """Reads requests from standard input in a thread, so that an answer can be stopped while it is generated."""

    def __init__(self) -> None:
        self._queue: queue.Queue[ChatRequest | LoraRocmError | None] = queue.Queue()
        self._stop = threading.Event()
        threading.Thread(target=self._read, daemon=True, name="requests").start()

    def _read(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as lines:  # a buffer's lock would be held at interpreter exit
            for line in lines:
                try:
                    request = chat_request(line)
                except LoraRocmError as error:  # is raised where it is asked for
                    self._queue.put(error)
                    break
                if isinstance(request, StopRequest):
                    self._stop.set()
                else:
                    self._queue.put(request)
        self._stop.set()
        self._queue.put(None)

    def next(self) -> ChatRequest | None:
        request = self._queue.get()
        if isinstance(request, LoraRocmError):
            raise request
        if request is not None:
            self._stop.clear()
        return request

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()


@dataclass
class ChatModel:
    """One side of the chat, the base model or the model with its adapter, and its conversation.

    Attributes:
        name: BASE or ADAPTER.
        as_it_is: returns a context in which the loaded model answers for this side.
        messages: role and content of each message of the conversation.
    """

    name: str
    as_it_is: Callable[[], AbstractContextManager[None]]
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, pieces: Generator[str, None, str], emit: Emit, is_stopped: Callable[[], bool]) -> Iterator[None]:
        """Emit an answer piece by piece and append it to the conversation. Each step of the iterator emits one piece.

        Args:
            pieces: yields pieces of text and returns the reason why the answer ended.
            emit: emits an event.
            is_stopped: returns whether the answer should end now.
        """
        written, count, ended = list[str](), 0, ""
        while not ended:
            try:
                with self.as_it_is():
                    piece = next(pieces)
            except StopIteration as last:
                ended = str(last.value)
            except UnusableText as error:
                emit(NoticeEvent(text=f"{error.what} {error.fix}"))
                self.messages.pop()
                emit(AnsweredEvent(side=self.name, tokens=0, ended="refused"))
                return
            else:
                count += 1
                written.append(piece)
                if piece:
                    emit(WrittenEvent(side=self.name, text=piece))
                ended = "stopped" if is_stopped() else ""
                yield
        self.messages.append({"role": ANSWERS, "content": "".join(written)})
        emit(AnsweredEvent(side=self.name, tokens=count, ended=ended))


def messages_of(request: ResetRequest, side: str) -> list[dict[str, str]]:
    """Return the messages with which a side's conversation begins."""
    found = [{"role": "system", "content": request.system}] if request.system else []
    for each in request.earlier:
        if side in each.answers:
            found.append({"role": "user", "content": each.prompt})
            found.append({"role": ANSWERS, "content": each.answers[side]})
    return found


def emit_notices(texts: Iterable[str], emit: Emit) -> None:
    """Emit each text as a notice."""
    for text in texts:
        emit(NoticeEvent(text=text))


def chat(
    job: ChatJob,
    registry: FamilyRegistry = FAMILIES,
    requests: Requests | None = None,
    emit: Emit = to_output,
) -> None:
    """Load the model of ``job.recipe`` with the adapter ``job.adapter``, and answer requests until their source ends.

    Raises:
        UserError: no-chat: models of this family cannot chat.
        LoraRocmError: the model or the adapter cannot be loaded.
    """
    requests = requests or InputRequests()
    recipe = recipe_of_run(job.recipe, registry, job.spare_cache)
    family = family_for(recipe)
    if not isinstance(family, Answering):
        what, fix = f"{recipe.spec.title} cannot chat.", "Use lora-rocm sample."
        raise UserError("no-chat", what, where=str(job.adapter), fix=fix)
    device, settings = start_device(recipe)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
    model = family.load(dtype, torch.device("cpu"))

    def notify(text: str) -> None:
        emit(NoticeEvent(text=text))

    emit_notices(family.prompt_notices, emit)

    newest, _ = latest_valid(RunDir(job.recipe.parent))
    require_trained_base(newest, recipe.model.name_or_path, family, notify)
    adapter = attach_file(family, model, job.adapter, 1.0, notify)
    assert adapter is not None, "its strength is not 0"
    model.place(open_placement(device, settings))
    family.fuse(model, triton=False)
    for component in model.components.values():
        component.eval()
    strength = 1.0
    adapted = ChatModel(ADAPTER, lambda: nullcontext() if strength == 1.0 else adapter.scaled(strength))
    sides = {BASE: ChatModel(BASE, adapter.disabled), ADAPTER: adapted}
    emit(ReadyEvent(adapter=str(job.adapter), base=recipe.model.name_or_path))
    limit = LimitFollower(device, settings)
    while (request := requests.next()) is not None:
        limit.renew_if_due()
        match request:
            case ResetRequest():
                for side in sides.values():
                    side.messages = messages_of(request, side.name)
            case AskRequest():
                strength = request.strength
                sampling = Sampling(request.temperature, request.top_p, request.max_tokens, request.seed)
                running = []
                for side in (sides[name] for name in request.sides):
                    side.messages.append({"role": "user", "content": request.prompt})
                    pieces = family.answer(model, side.messages, sampling)
                    running.append(side.answer(pieces, emit, lambda: requests.stopped))
                while running:  # one token of each in turn
                    running = [each for each in running if next(each, running) is None]
