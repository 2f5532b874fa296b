"""Everything that happens is one event: a JSON object on a line of ``events.jsonl``.

The progress bar, TensorBoard, the report and ``status`` are readers of that stream. Every event has
``type``, ``time`` (seconds since the epoch) and ``session`` (counts the starts of the worker in this run directory);
the other fields of each type, and what they hold, are listed in EVENT_FIELDS. Writers are held to that list. Readers
pass over a line that does not keep to it: it is damaged, or was not written by this program.
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

WHOLE, NUMBER, TEXT, TRUTH, TEXTS = "whole number", "number", "text", "truth", "texts"
COUNTS, NUMBERS, PROBLEMS, ANYTHING = "counts", "numbers", "problems", "anything"
MAX_WHOLE, MAX_NUMBER = 2**63, 1e100  # products and sums of them are finite


def or_null(kind: str) -> str:
    """The kind of a field that may be null. A number that is not finite is written as one, and read as null."""
    return f"{kind}?"


EVENT_FIELDS: dict[str, dict[str, str]] = {
    # a worker started; resumed_from is an update count or null
    "start": {
        "pid": WHOLE,
        "device": TEXT,
        "torch": TEXT,
        "threads": WHOLE,
        "precision": TEXT,
        "resumed_from": or_null(WHOLE),
    },
    # phase: load, cache, compile, step, checkpoint, preview, export; state: begin or end; seconds on end
    "phase": {"phase": TEXT, "state": TEXT, "seconds": NUMBER},
    # what the data came to
    "data": {
        "samples": WHOLE,
        "set_aside": PROBLEMS,
        "notices": TEXTS,
        "buckets": COUNTS,
        "steps_per_epoch": WHOLE,
        "max_train_steps": WHOLE,
    },
    # caching goes on: what (images, captions; sizes, hashes, texts: what is only looked at), done, total, per_second
    "cache": {"what": TEXT, "done": WHOLE, "total": WHOLE, "per_second": or_null(NUMBER)},
    # compiling goes on: done and total are sizes of pictures, size is what is compiled for now, else empty
    "compile": {"size": TEXT, "done": WHOLE, "total": WHOLE},
    # a damaged cache entry was encoded again: kind (image, text), the picture or caption, what was wrong
    "repaired": {"kind": TEXT, "item": TEXT, "reason": TEXT},
    # one confirmed update; seconds: the whole step, waiting for the loader, copies to the device, checking them there,
    # waiting for the verdict; optimizer: name -> what the optimizer tells of itself (optim/rule.py)
    "step": {
        "updates": WHOLE,
        "max_train_steps": WHOLE,
        "iteration": WHOLE,
        "epoch": or_null(NUMBER),
        "loss": or_null(NUMBER),
        "learning_rate": NUMBER,
        "grad_norm": or_null(NUMBER),
        "step_s": NUMBER,
        "loading_s": NUMBER,
        "copy_s": NUMBER,
        "check_s": NUMBER,
        "wait_s": NUMBER,
        "memory_bytes": NUMBER,
        "transfer_checks": WHOLE,
        "transfer_failures": WHOLE,
        "loss_scale": or_null(NUMBER),
        "optimizer": NUMBERS,
    },
    # kind: transfer, nonfinite, fp16-overflow, out-of-memory
    "incident": {
        "kind": TEXT,
        "iteration": or_null(WHOLE),
        "samples": or_null(TEXTS),
        "detail": TEXT,
        "action": TEXT,
    },
    # known answers were asked for again; checks: their names; detail: what was wrong, else empty
    "canary": {"updates": WHOLE, "passed": TRUTH, "checks": TEXTS, "detail": TEXT, "seconds": or_null(NUMBER)},
    "validation": {"updates": WHOLE, "loss": or_null(NUMBER)},
    "checkpoint": {"updates": WHOLE, "path": TEXT, "lora": or_null(TEXT)},
    # one preview round of a run; pictures are paths relative to the run directory
    "preview": {"updates": WHOLE, "pictures": TEXTS},
    # a number for the concept (train/concept.py)
    "concept": {"score": NUMBER, "control": or_null(NUMBER), "detail": ANYTHING},
    "export": {"format": TEXT, "path": TEXT, "max_difference": or_null(NUMBER), "cannot_read": TEXTS},
    "notice": {"text": TEXT},
    # something is done otherwise from here on (host/changes.py): id; effect: exact or rounding; seen: because of what
    "change": {"id": TEXT, "effect": TEXT, "seen": TEXT, "text": TEXT},
    # of the supervisor: a worker failed. seen: see host/changes.py, or empty; phase and activity: where it was;
    # silent_s, limit_s: null unless it hung; code, what, where: of its error, or how it ended; stacks: file in the run
    # directory or null; kernel_log: lines of the system's log since its start
    "failure": {
        "seen": TEXT,
        "phase": TEXT,
        "activity": or_null(TEXT),
        "updates": or_null(WHOLE),
        "silent_s": or_null(NUMBER),
        "limit_s": or_null(NUMBER),
        "code": TEXT,
        "what": TEXT,
        "where": TEXT,
        "stacks": or_null(TEXT),
        "kernel_log": TEXTS,
    },
    # of the supervisor: it starts the worker again. spent, budget: see runtime.max_restarts; attempt: see train/loop.py
    "restart": {
        "number": WHOLE,
        "spent": NUMBER,
        "budget": NUMBER,
        "progress": TRUTH,
        "from_updates": or_null(WHOLE),
        "attempt": WHOLE,
        "changes": TEXTS,
    },
    "error": {"code": TEXT, "what": TEXT, "where": TEXT, "fix": TEXT, "exit_code": WHOLE},
    # the worker is leaving: reason is done or stopped
    "end": {"reason": TEXT, "updates": WHOLE, "exit_code": WHOLE},
}
"""The fields of each type of event in a run directory, and what each field holds."""

CHILD_FIELDS: dict[str, dict[str, str]] = {
    # sample drew pictures that belong to no step of a run; their paths are absolute
    "drawn": {"pictures": TEXTS},
    # self-test: the names of all checks; then for each of them, before and after
    "checks": {"names": TEXTS},
    "check": {"name": TEXT, "timeout_s": NUMBER},
    "result": {"name": TEXT, "status": TEXT, "seconds": NUMBER, "detail": TEXT},
    # benchmarks: what is measured, the bus of each GPU; then for each row, before and after
    "machine": {
        "device": TEXT,
        "gpu": TRUTH,
        "torch": TEXT,
        "hip": or_null(TEXT),
        "cuda": or_null(TEXT),
        "threads": WHOLE,
        "budget_bytes": or_null(NUMBER),
        "integrated": or_null(TRUTH),
        "gpus": ANYTHING,
    },
    "link": {"links": ANYTHING},
    "begin": {"number": WHOLE, "limit_s": NUMBER, "fields": ANYTHING},
    "row": {"number": WHOLE, "problem": or_null(TEXT)},
}
"""The same for events that a child without a run directory writes (``emit``). ``export`` and ``error`` are above."""

WITH_FIGURES = ("machine", "row")
"""Types that carry further fields: what a benchmark has found."""

_FIELDS = {**EVENT_FIELDS, **CHILD_FIELDS}
_OF_EVERY_EVENT = {"time": NUMBER, "session": WHOLE}


def event_line(event: dict[str, Any], ascii_only: bool = False) -> bytes:
    """The line that stands for an event.

    Raises:
        TypeError: no reader would take the line: the type or a field is unknown, a field is missing or holds something
            else. That is a mistake of the code that writes the event, and it has to be heard of where it is made.
    """
    event_type = event["type"]
    expected = _FIELDS.get(event_type)
    if expected is None:
        raise TypeError(f"there is no event {event_type!r}")
    named = event.keys() - {"type", *_OF_EVERY_EVENT}
    if expected.keys() - named or (named - expected.keys() and event_type not in WITH_FIGURES):
        raise TypeError(f"event {event_type}: {sorted(named)} is not {sorted(expected)}")
    line = json.dumps(event, ensure_ascii=ascii_only).encode("utf-8", "backslashreplace")
    if event_of(line) is None:
        read = {**dict.fromkeys(_OF_EVERY_EVENT, 0), **json.loads(line, parse_constant=lambda name: None)}
        wrong = [f"{name} is {event[name]!r}, not {expected[name]}" for name in _misfits(read, expected)]
        raise TypeError(f"event {event_type}: {'; '.join(wrong)}")
    return line + b"\n"


def emit(event_type: str, **fields: Any) -> None:
    """One event on standard output: how a child without a run directory tells its parent (``run.children``).

    Raises:
        TypeError: see ``event_line``.
    """
    sys.stdout.write(event_line({"type": event_type, **fields}, ascii_only=True).decode("ascii"))
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
        """Append one event and flush it to the operating system.

        Raises:
            TypeError: see ``event_line``.
            StorageError: the event cannot be written.
        """
        event = {"type": event_type, "time": round(time.time(), 3), "session": self.session, **fields}
        line = event_line(event)
        try:
            self._file.write(line)
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
        found = [event for event in map(event_of, lines) if event is not None]
        return [event for event in found if event["type"] in self._types] if self._types else found


def event_of(line: bytes) -> dict[str, Any] | None:
    """The event that a line stands for; None if it stands for none. See ``event_line``."""
    try:  # a line may be torn by a crash (also UnicodeDecodeError), be a library's own, or nest without end
        return _checked(json.loads(line, parse_constant=lambda name: None))
    except (ValueError, RecursionError):
        return None


def _checked(event: Any) -> dict[str, Any] | None:
    """The event with every text made safe to print; None if a field is missing or of another type."""
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        return None
    event.setdefault("time", 0.0)
    event.setdefault("session", 0)
    if next(_misfits(event, _FIELDS.get(event["type"], {})), None) is not None:
        return None
    return {name: _legible(value) for name, value in event.items()}


def _misfits(event: dict[str, Any], expected: dict[str, str]) -> Iterator[str]:
    """Names of the fields that are missing or hold something else. Events of unknown types have no other fields."""
    for name, kind in {**_OF_EVERY_EVENT, **expected}.items():
        if name not in event or not _fits(kind, event[name]):
            yield name


def _fits(kind: str, value: Any) -> bool:
    if value is None and kind.endswith("?"):
        return True
    match kind.removesuffix("?"):
        case "whole number":
            return _is_whole(value)
        case "number":
            return _is_number(value)
        case "text":
            return isinstance(value, str)
        case "truth":
            return isinstance(value, bool)
        case "texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "counts":
            return isinstance(value, dict) and all(map(_is_whole, value.values()))
        case "numbers":
            return isinstance(value, dict) and all(map(_is_number, value.values()))
        case "problems":
            return isinstance(value, list) and all(map(_is_problem, value))
        case _:
            return True


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < MAX_WHOLE


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and abs(value) < MAX_NUMBER)


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
