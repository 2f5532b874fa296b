"""The chat of one server: one open conversation, and at most one child that keeps its model loaded.

The child is started by the first message, and shared by all tabs. It ends after idle minutes, by a button, with the
server, when another run's chat needs its place, and when a run begins to train. The conversation remains: the next
message starts a child again, which gets the earlier messages.

A thread waits for the child, so nothing that a child does holds up a request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lora_rocm.commands.chat_records import MAX_ANSWER_LETTERS, MAX_EXCHANGES, ChatRecord, Exchange, save_chat
from lora_rocm.commands.chat_session import SIDES, Answer, Options, await_ready, chat_job, opened_chat, request_of
from lora_rocm.commands.output import Failure
from lora_rocm.errors import LoraRocmError, UserError, WorkerDiedError
from lora_rocm.processes.jobs import ChatJob, ResetRequest, StopRequest
from lora_rocm.processes.tool import Tool
from lora_rocm.rundir.event_types import AnsweredEvent, NoticeEvent, ReadyEvent, WrittenEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.free_gpu import require_room, running_runs

CHANGED, WRITTEN = "chat", "chat-text"
"""Names of the live messages: something changed; more text of an answer."""
PAUSE_S, WAIT_S, WATCH_S = 0.25, 0.25, 2.0
MAX_NOTICES = 20
Phase = Literal["none", "loading", "ready", "answering"]
Reason = Literal["", "idle", "asked", "training", "replaced", "closed"]


class ChatEndedError(Exception):
    """The child is no longer wanted."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass
class ChatLimits:
    """Times in seconds.

    Attributes:
        idle_s: after this time without a message the child ends.
        silent_s: after this time without a sign of the child, it counts as hung.
        load_s: the same while it loads the model.
        stop_s: time in which it has to obey the stop button.
    """

    idle_s: float = 600.0
    silent_s: float = 600.0
    load_s: float = 3600.0
    stop_s: float = 20.0


@dataclass
class OpenPrompt:
    """A prompt that is being answered. answers: the text of each side so far."""

    prompt: str
    options: Options
    answers: dict[str, Answer]
    wants_stop: bool = False


@dataclass
class ChatChild:
    """A child and its thread. wanted_end: why it has to end; empty while it is wanted."""

    run_dir: RunDir
    updates: int
    job: ChatJob
    phase: Phase = "loading"
    wanted_end: Reason = ""
    heard_s: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    trained: frozenset[Path] = frozenset()
    watched_s: float = 0.0
    stop_sent_s: float | None = None


@dataclass(frozen=True)
class ChatState:
    """The state of the chat, for a page.

    Attributes:
        run_dir: the run of the open conversation; None if there is none.
        record: the open conversation.
        phase: the child's activity.
        pending: the prompt that is being answered.
        unanswered: a prompt that got no answer, because the child ended.
        failure: why the child ended, if that was an error.
        reason: why it ended otherwise.
        notices: notices of the child.
    """

    run_dir: RunDir | None
    record: ChatRecord | None
    phase: Phase
    pending: OpenPrompt | None
    unanswered: OpenPrompt | None
    failure: Failure | None
    reason: Reason
    notices: tuple[str, ...]


class ChatHost:
    """The chat of one server.

    Args:
        folders: the folders of the server; runs in them are not disturbed while they train.
        announce: sends the names of changes to all tabs.
    """

    def __init__(self, folders: Folders, announce: Callable[[set[str]], None]) -> None:
        self._folders, self._announce, self.limits = folders, announce, ChatLimits()
        self._changed = threading.Condition(threading.RLock())
        self._child: ChatChild | None = None
        self._state = ChatState(None, None, "none", None, None, None, "", ())
        self._is_closed, self._announced_s = False, 0.0

    # What requests call. Each returns at once.

    def state(self) -> ChatState:
        """Return what a page shows now."""
        with self._changed:
            phase: Phase = "none" if self._child is None else self._child.phase
            pending = self._state.pending
            if pending is not None:
                pending = replace(pending, answers=dict(pending.answers))
                phase = phase if phase == "loading" else "answering"
            return replace(self._state, phase=phase, pending=pending)

    def send(self, run_dir: RunDir, source: Path, updates: int, prompt: str, options: Options) -> None:
        """Begin to answer a prompt in the open conversation, or in a new one if another run or file is meant.

        Args:
            run_dir: the run.
            source: its directory, or the LoRA file of a step.
            updates: step of the LoRA file; 0 for the newest.
            prompt: the prompt.
            options: options of the answers. The system prompt counts at the beginning of a conversation.

        Raises:
            UserError: chat-busy: another prompt is being answered. chat-long: the conversation is at its limit.
            LoraRocmError: see ``chat_job``.
        """
        job = chat_job(source)
        with self._changed:
            # Refuse what cannot be done now
            if self._is_closed or self._state.pending is not None:
                raise _busy(self._state.run_dir)
            record = self._state.record
            if record is None or self._state.run_dir != run_dir or record.updates != updates:
                record = ChatRecord(options.system, updates, time.time())
            if len(record.exchanges) >= MAX_EXCHANGES:
                what, fix = f"This conversation has {MAX_EXCHANGES} prompts, the most.", "Begin a new conversation."
                raise UserError("chat-long", what, where=str(run_dir.path), fix=fix)
            # Keep the prompt, and hand it to the child
            pending = OpenPrompt(prompt, options, {side: Answer(side, "", 0, "") for side in SIDES[options.side]})
            self._state = ChatState(run_dir, record, "none", pending, None, None, "", ())
            before = self._child
            if before is None or before.wanted_end or before.job.adapter != job.adapter or before.run_dir != run_dir:
                self._start(ChatChild(run_dir, updates, job), before)
            self._changed.notify_all()
        self._announce_change()

    def stop(self) -> None:
        """Ask the child to end its answers."""
        with self._changed:
            if self._state.pending is not None:
                self._state.pending.wants_stop = True
                if self._child is not None and self._child.phase == "loading":
                    self._child.wanted_end = "asked"  # nothing has been written yet
            self._changed.notify_all()
        self._announce_change()

    def begin(self) -> None:
        """Close the open conversation. The child stays, for the next one.

        Raises:
            UserError: chat-busy.
        """
        self._open(None, None)

    def reopen(self, run_dir: RunDir, record: ChatRecord) -> None:
        """Open an earlier conversation, to continue it.

        Raises:
            UserError: chat-busy.
        """
        self._open(run_dir, record)

    def _open(self, run_dir: RunDir | None, record: ChatRecord | None) -> None:
        with self._changed:
            if self._state.pending is not None:
                raise _busy(self._state.run_dir)
            self._state = ChatState(run_dir, record, "none", None, None, None, "", ())
        self._announce_change()

    def end(self, reason: Reason = "asked") -> None:
        """Ask the child to end. The conversation stays open."""
        with self._changed:
            if self._child is not None:
                self._child.wanted_end = self._child.wanted_end or reason
            self._changed.notify_all()

    def close(self) -> None:
        """End the child for good. It does not wait, so a handler of signals may call it."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.wanted_end = child.wanted_end or "closed"

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the child has ended, but no longer than this."""
        child = self._child
        if child is not None and child.thread is not None:
            child.thread.join(timeout_s)

    # The thread of a child.

    def _start(self, child: ChatChild, before: ChatChild | None) -> None:
        if before is not None:
            before.wanted_end = before.wanted_end or "replaced"
        self._child = child
        child.thread = threading.Thread(target=self._serve, args=(child, before), daemon=True, name="ui-chat")
        child.thread.start()

    def _serve(self, child: ChatChild, before: ChatChild | None) -> None:
        """Load the model and answer prompts until the child is no longer wanted, or fails."""
        failure: Failure | None = None
        reason: Reason = ""
        try:
            if before is not None and before.thread is not None:
                before.thread.join()
            self._require_wanted(child)
            child.trained = self._training()
            require_room(self._folders, child.run_dir)
            with opened_chat(child.job) as tool:
                await_ready(tool, self._notice, lambda: self._check(child, tool, self.limits.load_s))
                self._answer_all(child, tool)
        except ChatEndedError as ended:
            reason = ended.reason
        except LoraRocmError as error:
            failure = Failure.of(error)
        except Exception as error:  # edge: the page shows it, and the server goes on
            what = f"The chat failed in an unexpected way: {type(error).__name__}: {error}"
            failure = Failure.of(LoraRocmError("page-failed", what, fix="Please report this as a bug."))
        self._finish(child, failure, reason)

    def _answer_all(self, child: ChatChild, tool: Tool) -> None:
        """Answer prompts, each in the open conversation.

        Raises:
            ChatEndedError: the child is no longer wanted.
            LoraRocmError: it died, or reported an error.
        """
        known: ChatRecord | None = None
        while True:
            pending = self._next(child, tool)
            record = self._state.record
            assert record is not None, "a prompt belongs to a conversation"
            if record != known:
                tool.send(ResetRequest(record.system, record.earlier))
            known = self._answered(child, tool, pending, record)

    def _next(self, child: ChatChild, tool: Tool) -> OpenPrompt:
        """Wait for a prompt.

        Raises:
            ChatEndedError: the child is no longer wanted, or had none for too long.
            LoraRocmError: it died while it waited.
        """
        begun_s = time.monotonic()
        while True:
            with self._changed:
                if self._child is child and self._state.pending is not None and not child.wanted_end:
                    child.phase, child.heard_s, child.stop_sent_s = "answering", time.monotonic(), None
                    return self._state.pending
                if child.phase != "ready":
                    child.phase = "ready"
                    self._announce_change()
                self._changed.wait(WAIT_S)
                is_idle = self._state.pending is None and time.monotonic() - begun_s > self.limits.idle_s
                if is_idle and not child.wanted_end:  # in the lock: a message that comes now starts another child
                    child.wanted_end = "idle"
            self._require_wanted(child)
            if tool.child.poll() is not None:
                list(tool.heard(ReadyEvent))  # raises why it ended

    def _answered(self, child: ChatChild, tool: Tool, pending: OpenPrompt, record: ChatRecord) -> ChatRecord:
        """Answer one prompt, save the conversation, and return it."""
        self._announce_change()
        tool.send(request_of(pending.prompt, pending.options, len(record.exchanges)))
        heard = tool.heard(AnsweredEvent, len(pending.answers), lambda: self._check(child, tool, self.limits.silent_s))
        for event in heard:
            child.heard_s = time.monotonic()
            match event:
                case NoticeEvent():
                    self._notice(event.text)
                case WrittenEvent():
                    self._write(pending, event)
                case AnsweredEvent():
                    with self._changed:
                        before = pending.answers[event.side]
                        pending.answers[event.side] = replace(before, tokens=event.tokens, ended=event.ended)
        return self._kept(pending, record)

    def _write(self, pending: OpenPrompt, event: WrittenEvent) -> None:
        with self._changed:
            before = pending.answers[event.side]
            text = before.text + event.text
            pending.answers[event.side] = replace(before, text=text[:MAX_ANSWER_LETTERS], tokens=before.tokens + 1)
            pending.wants_stop |= len(text) >= MAX_ANSWER_LETTERS
        if time.monotonic() - self._announced_s > PAUSE_S:
            self._announced_s = time.monotonic()
            self._announce({WRITTEN})

    def _kept(self, pending: OpenPrompt, record: ChatRecord) -> ChatRecord:
        """Add a prompt and its answers to the conversation, write its file, and return it."""
        answers = tuple(replace(each, ended=each.ended or "stopped") for each in pending.answers.values())
        record = record.with_exchange(Exchange(pending.prompt, replace(pending.options, system=""), answers))
        failure, run_dir = None, self._state.run_dir
        assert run_dir is not None, "a prompt belongs to a run"
        try:
            save_chat(run_dir, record)
        except LoraRocmError as error:  # the conversation goes on without its file
            failure = Failure.of(error)
        with self._changed:
            self._state = replace(self._state, record=record, pending=None, failure=failure)
        self._announce_change()
        return record

    def _finish(self, child: ChatChild, failure: Failure | None, reason: Reason) -> None:
        """Record why a child ended. A prompt without a complete answer keeps what was written, or is offered again."""
        with self._changed:
            if self._child is not child:  # another has taken its place
                return
            self._child, pending, record = None, self._state.pending, self._state.record
            if pending is not None and record is not None:
                if failure is None and any(answer.text for answer in pending.answers.values()):
                    self._kept(pending, record)
                else:
                    self._state = replace(self._state, pending=None, unanswered=pending)
            self._state = replace(self._state, failure=failure or self._state.failure, reason=reason)
        self._announce_change()

    def _check(self, child: ChatChild, tool: Tool, silent_s: float) -> None:
        """Pass on a stop, and check that the child is wanted and shows signs of life.

        Raises:
            ChatEndedError: the child is no longer wanted.
            WorkerDiedError: worker-hung.
        """
        self._require_wanted(child)
        now_s, pending = time.monotonic(), self._state.pending
        if pending is not None and pending.wants_stop and child.phase == "answering" and child.stop_sent_s is None:
            tool.send(StopRequest())
            child.stop_sent_s = now_s
        stopped_s = now_s if child.stop_sent_s is None else child.stop_sent_s
        if now_s - child.heard_s > silent_s or now_s - stopped_s > self.limits.stop_s:
            what = f"The process of the chat gave no sign for {now_s - child.heard_s:.0f} s, so it was killed."
            fix = "Send the message again; if it happens again, lora-rocm doctor lists known problems of this machine."
            raise WorkerDiedError("worker-hung", what, fix=fix)

    def _require_wanted(self, child: ChatChild) -> None:
        """Check that a child is still wanted, and that no further run began to train.

        Raises:
            ChatEndedError: it is not.
        """
        if child.wanted_end:
            raise ChatEndedError(child.wanted_end)
        if child.watched_s and time.monotonic() - child.watched_s > WATCH_S:
            child.watched_s = time.monotonic()
            if not self._training() <= child.trained:
                child.wanted_end = "training"
                raise ChatEndedError("training")
        child.watched_s = child.watched_s or time.monotonic()

    def _training(self) -> frozenset[Path]:
        return frozenset(run_dir.path for run_dir in running_runs(self._folders))

    def _notice(self, text: str) -> None:
        with self._changed:
            self._state = replace(self._state, notices=(*self._state.notices, text)[-MAX_NOTICES:])
        self._announce_change()

    def _announce_change(self) -> None:
        self._announce({CHANGED})


def _busy(run_dir: RunDir | None) -> UserError:
    what, fix = "Another message is being answered.", "Wait until it ends, or stop it."
    return UserError("chat-busy", what, where=str(run_dir.path) if run_dir is not None else "", fix=fix)
