"""Event files: everything that happens in a run is an event, a JSON object on a line of ``events.jsonl``.

The progress bar, TensorBoard, the report and ``status`` read this stream. The classes of ``event_types`` define the
types and fields of events. A reader skips a line that matches none of them: it is damaged, or from another version.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from lora_rocm.errors import ResumeError, StorageError, storage_error
from lora_rocm.foundation.files import make_folder, open_in_place, refuse_link
from lora_rocm.foundation.units import size_text
from lora_rocm.rundir.event_types import TYPES, Event
from lora_rocm.rundir.layout import RunDir


def emit(event: Event) -> None:
    """Write one event to standard output, as children without a run directory do (``supervisor.subprocesses``)."""
    sys.stdout.write(json.dumps(event.to_json()) + "\n")
    sys.stdout.flush()


class EventWriter:
    """Appends events to one file. A line torn by a crash is terminated first."""

    def __init__(self, path: Path, session: int = 0) -> None:
        self.path, self.session = path, session
        try:
            make_folder(path.parent)
            self._file = open_in_place(path)
            if self._file.tell() and not _ends_with_newline(path):
                self._file.write(b"\n")
        except OSError as error:
            raise storage_error(error, path) from error

    def write(self, event: Event) -> dict[str, Any]:
        """Append one event with the current time, and flush it to the operating system.

        Returns the event as readers receive it.

        Raises:
            StorageError: the event cannot be written.
        """
        dated = {**event.to_json(), "time": round(time.time(), 3), "session": self.session}
        try:
            self._file.write(json.dumps(dated, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise storage_error(error, self.path) from error
        return dated

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing retries what a full disk refused, which ``write`` reported
            self._file.close()


def size_if_there(path: Path) -> int | None:
    """Size of an event file in bytes; None if there is none. A link within the run directory is followed.

    Raises:
        ResumeError: no-file: it is something else, which a reader could wait for or read without end; link-refused:
            it is a link to a file outside of the run.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ResumeError(
            "no-file",
            "The events of a run are in a plain file; here is a folder, a pipe or a device.",
            where=str(path),
            fix="Take it away, or use another run directory.",
        )
    if not RunDir(path.parent).holds(path):
        try:
            refuse_link(path)
        except StorageError as error:  # not the machine's fault, where the file is only read
            raise ResumeError(error.code, error.what, where=error.where, fix=error.fix) from None
    return found.st_size


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


CHUNK_BYTES = 1 << 24
"""Bytes that are read at once, and the limit of a line: an event that names 100,000 images stays below it."""
MAX_EVENTS_BYTES = 1 << 28
"""Of a larger file only the end is read: half a million steps. A file of a run does not come near it."""
TAIL_BYTES = 1 << 18  # hundreds of steps
ENDLESS = b"?"  # replaces the start of a line that is too long, so that it parses as no event


class EventReader:
    """Follows one event file: ``poll`` returns the complete events since the last call and skips damaged ones.

    Args:
        path: the file; it need not exist yet.
        offset: bytes to skip at its start.
        types: types of the events to return; empty: all. Lines of other types, which may be very many, are not parsed.

    Of more than MAX_EVENTS_BYTES since the last call only the end is read.

    Attributes:
        skipped_bytes: that were not read because of this limit.

    Raises:
        StorageError: in ``poll``, see ``size_if_there``.
    """

    skipped_bytes = 0

    def __init__(self, path: Path, offset: int = 0, types: Sequence[str] = ()) -> None:
        self.path, self._offset, self._rest, self._types = path, offset, b"", types
        self._marks = [json.dumps(name).encode("ascii") for name in types]

    def poll(self) -> list[dict[str, Any]]:
        try:
            found = [event for line in self.lines() if (event := event_of(line)) is not None]
        except FileNotFoundError:
            return []
        return [event for event in found if event["type"] in self._types] if self._types else found

    def lines(self) -> Iterator[bytes]:
        """The complete lines since the last call that may be of wanted types."""
        size = size_if_there(self.path)
        if size is None:
            return
        if (too_many := size - self._offset - MAX_EVENTS_BYTES) > 0:
            self.skipped_bytes += too_many
            self._offset, self._rest = self._offset + too_many, ENDLESS  # the rest of a line parses as no event
        with self.path.open("rb") as file:
            file.seek(self._offset)
            yield from self._lines(file, size - self._offset)

    def _lines(self, file: BinaryIO, left_bytes: int) -> Iterator[bytes]:
        """The complete lines that may be of wanted types. A line without end takes no more memory than CHUNK_BYTES."""
        while data := file.read(min(CHUNK_BYTES, left_bytes)):  # and no more bytes than the file had: it may grow
            self._offset, left_bytes = self._offset + len(data), left_bytes - len(data)
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest if len(rest) < CHUNK_BYTES else ENDLESS
            yield from (line for line in lines if not self._marks or any(mark in line for mark in self._marks))


def event_of(line: bytes) -> dict[str, Any] | None:
    """The event on a line; None if it is no event, or of another version."""
    try:  # a line may be torn by a crash, printed by a library, or nested without end
        found = from_json(line)
        kind = TYPES.get(str(found.pop("type", ""))) if isinstance(found, dict) else None
        return None if kind is None else kind.read(found).to_json()
    except ValueError:
        return None


def read_events(path: Path, *types: str) -> list[dict[str, Any]]:
    """All complete events of a file (of these types), in the order written.

    Raises:
        StorageError: see ``EventReader``.
    """
    return EventReader(path, types=types).poll()


def unread_text(path: Path) -> str:
    """What is not read of an event file that is too large, as a sentence; empty if all is read.

    Raises:
        StorageError: see ``EventReader``.
    """
    size = size_if_there(path) or 0
    if size <= MAX_EVENTS_BYTES:
        return ""
    most = size_text(MAX_EVENTS_BYTES)
    return f"{path} has {size_text(size)}, which no run writes: only its last {most} were read. Is it damaged?"


def latest_steps(path: Path) -> list[dict[str, Any]]:
    """The ``current_steps`` of the last TAIL_BYTES of an event file, which take the same time in a run of any length.

    Raises:
        StorageError: see ``EventReader``.
    """
    size = size_if_there(path) or 0
    return current_steps(EventReader(path, max(0, size - TAIL_BYTES), types=("start", "step")).poll())


def last_steps(path: Path) -> list[dict[str, Any]]:
    """The last ``step`` event of each session. Lines are only looked at by their beginnings, and few are parsed.

    Raises:
        StorageError: see ``EventReader``.
    """
    found, last = list[bytes](), b""
    for line in EventReader(path, types=("start", "step")).lines():
        if line.startswith(b'{"type": "step"'):
            last = line
        elif line.startswith(b'{"type": "start"'):
            found, last = [*found, last], b""
    return [event for line in (*found, last) if line and (event := event_of(line)) is not None]


def current_steps(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """``step`` events in order of updates. If an update was made twice (after a resume), the newest event counts."""
    newest: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "start":
            resumed = event.get("resumed_from") or 0
            newest = {updates: step for updates, step in newest.items() if updates <= resumed}
        elif event["type"] == "step":
            newest[event["updates"]] = event
    return [newest[updates] for updates in sorted(newest)]
