"""Event files. Everything that happens in a run is an event, a JSON object on a line of ``events.jsonl``.

The progress bar, TensorBoard, the report and ``status`` read these files. The classes of ``event_types`` define the
types and fields of events. A reader skips a line that matches none of them: it is damaged, or from another version.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, overload

from lora_rocm.errors import ResumeError, StorageError, storage_error
from lora_rocm.foundation.files import make_folder, open_in_place, refuse_link
from lora_rocm.foundation.units import size_text
from lora_rocm.rundir.event_line import event_of
from lora_rocm.rundir.event_types import Event, StartEvent, StepEvent
from lora_rocm.rundir.layout import RunDir

E = TypeVar("E", bound=Event)


def emit(event: Event) -> None:
    """Write one event to standard output. Child processes without a run directory do this (``processes.tool``)."""
    sys.stdout.write(json.dumps(event.to_json()) + "\n")
    sys.stdout.flush()


class EventWriter:
    """Appends events to one file. A line torn by a crash is first terminated."""

    def __init__(self, path: Path, session: int = 0) -> None:
        self.path, self.session = path, session
        try:
            make_folder(path.parent)
            self._file = open_in_place(path)
            if self._file.tell() and not _ends_with_newline(path):
                self._file.write(b"\n")
        except OSError as error:
            raise storage_error(error, path) from error

    def write(self, event: E) -> E:
        """Append one event with the current time, and flush it to the operating system.

        Returns the event as readers receive it.

        Raises:
            StorageError: the event cannot be written.
        """
        dated = event.model_copy(update={"time": round(time.time(), 3), "session": self.session})
        try:
            self._file.write(
                json.dumps(dated.to_json(), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            )
            self._file.flush()
        except OSError as error:
            raise storage_error(error, self.path) from error
        return dated

    def close(self) -> None:
        # Closing retries a write that a full disk refused; ``write`` has reported it.
        with contextlib.suppress(OSError):
            self._file.close()


def size_if_there(path: Path) -> int | None:
    """Size of an event file in bytes, or None if there is no file. Links within the run directory are followed.

    Raises:
        ResumeError: "no-file", it is not a regular file, so reading could block or never end; or "link-refused", it is
            a link to a file outside of the run.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ResumeError(
            "no-file",
            "This event file cannot be read: it is a folder, a pipe or a device.",
            where=str(path),
            fix="Remove it, or use another run directory.",
        )
    if not RunDir(path.parent).holds(path):
        try:
            refuse_link(path)
        except StorageError as error:  # a user error here, because the file is only read
            raise ResumeError(error.code, error.what, where=error.where, fix=error.fix) from None
    return found.st_size


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


MAX_LINE_BYTES = 1 << 24
"""Maximum length of a line. An event that lists 100,000 images is shorter."""
CHUNK_BYTES = 1 << 18
"""Number of bytes read at a time, few enough to stay in the processor's cache until they are parsed."""
MAX_EVENTS_BYTES = 1 << 28
"""Maximum size read: half a million steps, far more than a run writes. Only the end of a larger file is read."""
TAIL_BYTES = 1 << 18  # hundreds of steps
ENDLESS = b"?"  # replaces the start of a line that is too long, so that it parses as no event


class EventReader:
    """Follows one event file: ``poll`` returns the complete events since the last call and skips damaged lines.

    Args:
        path: the event file; it may not exist yet.
        offset: number of bytes to skip at the start of the file.
        kinds: types of the events to return, or empty for all. Lines of other types are not parsed, because there may
            be many.

    If more than MAX_EVENTS_BYTES were added since the last call, only the end is read.

    Attributes:
        offset: position of the end of the last complete line.
        skipped_bytes: number of bytes that were not read because of the limit.

    Raises:
        StorageError: in ``poll``, see ``size_if_there``.
    """

    def __init__(self, path: Path, offset: int = 0, kinds: Sequence[type[Event]] = ()) -> None:
        self.path, self.offset, self._offset, self._rest, self._kinds = path, offset, offset, b"", tuple(kinds)
        self._marks = [json.dumps(kind.type).encode("ascii") for kind in kinds]
        self.skipped_bytes = 0

    def poll(self) -> list[Event]:
        try:
            found = [event for line in self.lines() if (event := event_of(line)) is not None]
        except FileNotFoundError:
            return []
        return [event for event in found if isinstance(event, self._kinds)] if self._kinds else found

    def lines(self, on_data: Callable[[bytes], object] = lambda data: None) -> Iterator[bytes]:
        """The complete lines added since the last call, except for types not in ``kinds``.

        ``on_data`` gets all bytes read.
        """
        size = size_if_there(self.path)
        if size is None:
            return
        if (too_many := size - self._offset - MAX_EVENTS_BYTES) > 0:
            self.skipped_bytes += too_many
            self._offset, self._rest = self._offset + too_many, ENDLESS  # the rest of a line parses as no event
        with self.path.open("rb") as file:
            file.seek(self._offset)
            left_bytes = size - self._offset  # read no more bytes than the file had: it may grow
            while data := file.read(min(CHUNK_BYTES, left_bytes)):
                on_data(data)
                if (end := data.rfind(b"\n")) >= 0:
                    self.offset = self._offset + end + 1
                self._offset, left_bytes = self._offset + len(data), left_bytes - len(data)
                *lines, rest = (self._rest + data).split(b"\n")
                self._rest = rest if len(rest) < MAX_LINE_BYTES else ENDLESS
                yield from (line for line in lines if not self._marks or any(mark in line for mark in self._marks))


@overload
def read_events(path: Path) -> list[Event]: ...
@overload
def read_events(path: Path, kind: type[E]) -> list[E]: ...
def read_events(path: Path, kind: type[Event] = Event) -> Sequence[Event]:
    """All complete events of a file that are of type ``kind``, in the order written.

    Raises:
        StorageError: see ``EventReader``.
    """
    return EventReader(path, kinds=() if kind is Event else (kind,)).poll()


def unread_text(path: Path) -> str:
    """A sentence about the part of an event file that is not read because the file is too large; otherwise empty.

    Raises:
        StorageError: see ``EventReader``.
    """
    size = size_if_there(path) or 0
    if size <= MAX_EVENTS_BYTES:
        return ""
    most = size_text(MAX_EVENTS_BYTES)
    return (
        f"{path} has {size_text(size)}, more than any run writes, so only its last {most} were read. It may be damaged."
    )


def latest_steps(path: Path) -> list[StepEvent]:
    """The current steps in the last TAIL_BYTES of an event file, so that reading takes equally long in any run.

    Raises:
        StorageError: see ``EventReader``.
    """
    size = size_if_there(path) or 0
    return current_steps(EventReader(path, max(0, size - TAIL_BYTES), kinds=(StartEvent, StepEvent)).poll())


def current_steps(events: Iterable[Event]) -> list[StepEvent]:
    """``step`` events in order of updates.

    If an update was made twice (after a resume), only the newest event is returned.
    """
    newest: dict[int, StepEvent] = {}
    for event in events:
        match event:
            case StartEvent():
                resumed = event.resumed_from or 0
                newest = {updates: step for updates, step in newest.items() if updates <= resumed}
            case StepEvent():
                newest[event.updates] = event
    return [newest[updates] for updates in sorted(newest)]
