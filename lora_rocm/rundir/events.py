"""Everything that happens is one event: a JSON object on a line of ``events.jsonl``.

The progress bar, TensorBoard, the report and ``status`` are readers of that stream. The
types of events and their fields are the classes of ``event_types``. A reader passes over a line that stands for none of
them: it is damaged, or was not written by this version.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from lora_rocm.errors import StorageError, storage_error
from lora_rocm.foundation.files import make_folder, open_in_place
from lora_rocm.rundir.event_types import TYPES, Event


def emit(event: Event) -> None:
    """One event on standard output: how a child without a run directory tells its parent (``run.children``)."""
    sys.stdout.write(json.dumps(event.to_json()) + "\n")
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

    def write(self, event: Event) -> dict[str, Any]:
        """Append one event, as of now, and flush it to the operating system; the event as its readers get it.

        Raises:
            StorageError: the event cannot be written.
        """
        dated = {**event.to_json(), "time": round(time.time(), 3), "session": self.session}
        try:
            self._file.write(json.dumps(dated, ensure_ascii=False).encode("utf-8") + b"\n")
            self._file.flush()
        except OSError as error:
            raise storage_error(error, self.path) from error
        return dated

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


CHUNK_BYTES = 1 << 24
ENDLESS = b"?"  # in place of a line's beginning: what follows it is no event


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
                found = [event for line in self._lines(file) if (event := event_of(line)) is not None]
        except FileNotFoundError:
            return []
        return [event for event in found if event["type"] in self._types] if self._types else found

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """The whole lines that may be of wanted types. A line without end costs no more memory than CHUNK_BYTES."""
        while data := file.read(CHUNK_BYTES):
            self._offset += len(data)
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest if len(rest) < CHUNK_BYTES else ENDLESS
            yield from (line for line in lines if not self._marks or any(mark in line for mark in self._marks))


def event_of(line: bytes) -> dict[str, Any] | None:
    """The event that a line stands for; None if it stands for none, or for one of another version."""
    try:  # a line may be torn by a crash, be a library's own, or nest without end
        found = from_json(line)
        kind = TYPES.get(str(found.pop("type", ""))) if isinstance(found, dict) else None
        return None if kind is None else kind.read(found).to_json()
    except ValueError:
        return None


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
