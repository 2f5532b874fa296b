"""Everything that happens is one event: a JSON object on a line of ``events.jsonl``.

The progress bar, TensorBoard, the report and ``status`` are readers of that stream. Every event has
``type``, ``time`` (seconds since the epoch) and ``session`` (counts the starts of the worker in this run directory);
the other fields of each type are listed in EVENT_FIELDS, which a test holds against what is written.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_rocm.errors import StorageError, storage_error
from lora_rocm.host.files import make_folder, open_in_place
from lora_rocm.host.printable import legible

EVENT_FIELDS: dict[str, tuple[str, ...]] = {
    # a worker started; resumed_from is an update count or null
    "start": ("pid", "device", "torch", "threads", "precision", "resumed_from"),
    # phase: load, cache, compile, step, checkpoint, preview, export; state: begin or end; seconds on end
    "phase": ("phase", "state", "seconds"),
    # what the data came to
    "data": ("samples", "set_aside", "notices", "buckets", "steps_per_epoch", "max_train_steps"),
    # caching goes on: what (images, captions; sizes, hashes, texts: what is only looked at), done, total, per_second
    "cache": ("what", "done", "total", "per_second"),
    # compiling goes on: done and total are sizes of pictures, size is what is compiled for now, else empty
    "compile": ("size", "done", "total"),
    # a damaged cache entry was encoded again: kind (image, text), the picture or caption, what was wrong
    "repaired": ("kind", "item", "reason"),
    # one confirmed update; seconds: the whole step, waiting for the loader, copies to the device, checking them there,
    # waiting for the verdict
    "step": (
        "updates",
        "max_train_steps",
        "iteration",
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "step_s",
        "loading_s",
        "copy_s",
        "check_s",
        "wait_s",
        "memory_bytes",
        "transfer_checks",
        "transfer_failures",
        "loss_scale",
    ),
    # kind: transfer, nonfinite, fp16-overflow, out-of-memory
    "incident": ("kind", "iteration", "samples", "detail", "action"),
    # known answers were asked for again; checks: their names; detail: what was wrong, else empty
    "canary": ("updates", "passed", "checks", "detail", "seconds"),
    "validation": ("updates", "loss"),
    "checkpoint": ("updates", "path", "lora"),
    # one preview round; pictures are paths relative to the run directory
    "preview": ("updates", "pictures"),
    # a number for the concept (train/concept.py)
    "concept": ("score", "control", "detail"),
    "export": ("format", "path", "max_difference", "cannot_read"),
    "notice": ("text",),
    # something is done otherwise from here on (host/changes.py): id; effect: exact or rounding; seen: because of what
    "change": ("id", "effect", "seen", "text"),
    # of the supervisor: a worker failed. seen: see host/changes.py, or empty; phase and activity: where it was;
    # silent_s, limit_s: null unless it hung; code, what, where: of its error, or how it ended; stacks: file in the run
    # directory or null; kernel_log: lines of the system's log since its start
    "failure": (
        "seen",
        "phase",
        "activity",
        "updates",
        "silent_s",
        "limit_s",
        "code",
        "what",
        "where",
        "stacks",
        "kernel_log",
    ),
    # of the supervisor: it starts the worker again. spent, budget: see runtime.max_restarts; attempt: see train/loop.py
    "restart": ("number", "spent", "budget", "progress", "from_updates", "attempt", "changes"),
    "error": ("code", "what", "where", "fix", "exit_code"),
    # the worker is leaving: reason is done or stopped
    "end": ("reason", "updates", "exit_code"),
}


WHOLE, NUMBER, TEXT, TRUTH, TEXTS = "whole number", "number", "text", "truth", "texts"
# What the fields hold, by name; those of one type of event that hold something else go by "type.name". "?": or null.
# What is not so was not written by this program, and no reader has to be ready for it.
KINDS: dict[str, str] = {
    **dict.fromkeys(("pid", "threads", "done", "total", "updates", "max_train_steps", "iteration", "session"), WHOLE),
    **dict.fromkeys(("transfer_checks", "transfer_failures", "exit_code", "number", "steps_per_epoch"), WHOLE),
    **dict.fromkeys(("resumed_from", "failure.updates", "from_updates", "attempt", "incident.iteration"), f"{WHOLE}?"),
    **dict.fromkeys(("time", "learning_rate", "step_s", "loading_s", "copy_s", "check_s", "wait_s"), NUMBER),
    **dict.fromkeys(("memory_bytes", "score", "spent", "budget"), NUMBER),
    **dict.fromkeys(("loss", "grad_norm", "loss_scale", "epoch", "per_second", "seconds", "control"), f"{NUMBER}?"),
    **dict.fromkeys(("max_difference", "silent_s", "limit_s"), f"{NUMBER}?"),
    **dict.fromkeys(("device", "torch", "precision", "phase", "state", "kind", "item", "reason", "action"), TEXT),
    **dict.fromkeys(("path", "format", "text", "id", "effect", "what", "where", "fix", "code", "detail", "size"), TEXT),
    **dict.fromkeys(("seen", "activity", "stacks", "lora"), f"{TEXT}?"),
    **dict.fromkeys(("notices", "checks", "pictures", "cannot_read", "changes", "kernel_log"), TEXTS),
    "phase.seconds": NUMBER,
    "passed": TRUTH,
    "samples": WHOLE,
    "incident.samples": f"{TEXTS}?",
    "set_aside": "problems",
    "buckets": "counts",
    "concept.detail": "anything",
    "progress": "anything",
}
MAX_WHOLE, MAX_NUMBER = 2**63, 1e100  # products and sums of them are finite


def emit(event_type: str, **fields: Any) -> None:
    """One event on standard output: how a child without a run directory tells its parent (``run.children``)."""
    sys.stdout.write(json.dumps({"type": event_type, **fields}) + "\n")
    sys.stdout.flush()


class EventWriter:
    """Appends events to one file; a line torn by a crash is closed off first."""

    def __init__(self, path: Path, session: int = 0) -> None:
        self.path, self.session = path, session
        try:
            make_folder(path.parent)
            self._file = open_in_place(path)
            if self._file.tell() and not _ends_with_newline(path):
                self._file.write(b"\n")
        except OSError as error:
            raise storage_error(error, path) from error

    def write(self, event_type: str, **fields: Any) -> dict[str, Any]:
        """Append one event and flush it to the operating system."""
        expected = EVENT_FIELDS[event_type]
        assert set(fields) == set(expected), f"event {event_type}: {sorted(fields)} is not {sorted(expected)}"
        event = {"type": event_type, "time": round(time.time(), 3), "session": self.session, **fields}
        try:
            self._file.write(json.dumps(event, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise storage_error(error, self.path) from error
        return event

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is tried again, and ``write`` has told
            self._file.close()


def _is_there(path: Path) -> bool:
    """Whether there is a plain file; links are followed.

    Raises:
        StorageError: what is there would be waited for, or read, without end.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise StorageError(
            "no-file",
            "The events of a run are in a plain file; here is a folder, a pipe or a device.",
            where=str(path),
            fix="Take it away, or use another run directory.",
        )
    return True


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


class EventReader:
    """Follows one event file: ``poll`` returns the whole events written since the last call, and skips damaged ones.

    Args:
        path: of the file; there may be none yet.
        offset: bytes of it that are passed over.
        types: of the events that are wanted; none: all. Lines of others, of which there may be very many, are not
            taken apart.

    Raises:
        StorageError: ``poll`` found something else than a plain file.
    """

    def __init__(self, path: Path, offset: int = 0, types: Sequence[str] = ()) -> None:
        self.path, self._offset, self._rest, self._types = path, offset, b"", types
        self._marks = [json.dumps(name).encode("ascii") for name in types]

    def poll(self) -> list[dict[str, Any]]:
        try:
            if not _is_there(self.path):
                return []
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._marks:
            lines = [line for line in lines if any(mark in line for mark in self._marks)]
        found = [event for event in map(_parse, lines) if event is not None]
        return [event for event in found if event["type"] in self._types] if self._types else found


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):  # a line torn by a crash (also UnicodeDecodeError), or a library's own
        return None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        return None
    event.setdefault("time", 0.0)
    event.setdefault("session", 0)
    fields = ("time", "session", *EVENT_FIELDS.get(event["type"], ()))
    whole = event.keys() >= set(fields) and all(_fits(event["type"], name, event[name]) for name in fields)
    return {name: _legible(value) for name, value in event.items()} if whole else None


def _fits(event_type: str, name: str, value: Any) -> bool:
    kind = KINDS.get(f"{event_type}.{name}") or KINDS[name]
    if value is None and kind.endswith("?"):
        return True
    match kind.removesuffix("?"):
        case "whole number":
            return _is_whole(value)
        case "number":
            return _is_whole(value) or (isinstance(value, float) and abs(value) < MAX_NUMBER)
        case "text":
            return isinstance(value, str)
        case "truth":
            return isinstance(value, bool)
        case "texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "counts":
            return isinstance(value, dict) and all(map(_is_whole, value.values()))
        case "problems":
            return isinstance(value, list) and all(map(_is_problem, value))
        case _:
            return True


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < MAX_WHOLE


def _is_problem(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name, ""), str) for name in ("where", "what", "fix"))
        and ({"where", "what"} <= value.keys())
    )


def _legible(value: Any) -> Any:
    """Names of files, captions and what libraries say are in events: nothing of it may steer a terminal."""
    if isinstance(value, str):
        return value if value.isprintable() else legible(value, keep="\n")
    if isinstance(value, list):
        return [_legible(item) for item in value]
    return {_legible(name): _legible(item) for name, item in value.items()} if isinstance(value, dict) else value


def read_events(path: Path, *types: str) -> list[dict[str, Any]]:
    """Every whole event of a file (of these types), in the order written.

    Raises:
        StorageError: see ``EventReader``.
    """
    return EventReader(path, types=types).poll()


def current_steps(events: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``step`` events in order of updates; of an update seen twice (after a resume) the newest attempt counts."""
    newest: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "start":
            resumed = event.get("resumed_from") or 0
            newest = {updates: step for updates, step in newest.items() if updates <= resumed}
        elif event["type"] == "step":
            newest[event["updates"]] = event
    return [newest[updates] for updates in sorted(newest)]
