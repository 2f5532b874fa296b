"""A journal of the changes in a folder, so that the newest one can be undone, whether it changed one file or many.

Each file is saved on its own by ``Edits``, which keeps its earlier content. The journal only has the names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import StorageError, UserError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import make_folder, write_atomic
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.ui.edits import EditConflict, Edits

MAX_CHANGES, MAX_JOURNAL_BYTES = 30, 1 << 25


@dataclass(frozen=True)
class FolderChange:
    """A change. kind: key of a text. paths: the changed files. time_s: when, in seconds since the epoch."""

    kind: str
    paths: tuple[Path, ...]
    time_s: float


@dataclass(frozen=True)
class Undone:
    """An undone change. undone: the restored files. left: files that were changed since, which stay as they are."""

    change: FolderChange
    undone: tuple[Path, ...]
    left: tuple[Path, ...]


class ChangeJournal:
    """The changes that were made in one folder. Another server that changes the same folder writes the same journal."""

    _lock = threading.Lock()

    def __init__(self, edits: Edits, folder: Path) -> None:
        self._edits = edits
        name = hashlib.sha256(str(folder).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._file = own_app_dir() / "ui" / "changes" / f"{name}.json"

    def changes(self) -> list[FolderChange]:
        """Return the changes, the newest last."""
        try:
            listed = parse_json(read_plain(self._file, MAX_JOURNAL_BYTES))
            return [FolderChange(str(each[0]), tuple(map(Path, each[1])), float(each[2])) for each in listed]
        except (OSError, BadJson, ValueError, TypeError, LookupError):
            return []  # none yet, or damaged: single files can still be undone

    def add(self, kind: str, paths: Sequence[Path]) -> None:
        """Add a change, and forget the oldest beyond MAX_CHANGES."""
        with self._lock:
            self._write([*self.changes(), FolderChange(kind, tuple(paths), time.time())][-MAX_CHANGES:])

    def undo(self) -> Undone:
        """Undo the newest change.

        Raises:
            UserError: nothing-to-undo: no change is known.
            StorageError: a file cannot be read or written.
        """
        with self._lock:
            changes = self.changes()
            if not changes:
                fix = "Only changes that were saved in the page can be undone."
                raise UserError("nothing-to-undo", "There is no change to undo.", fix=fix)
            undone, left = list[Path](), list[Path]()
            for path in changes[-1].paths:
                try:
                    self._edits.undo(path)
                    undone.append(path)
                except EditConflict:
                    left.append(path)
                except UserError:  # too many changes of this file were made since
                    left.append(path)
            self._write(changes[:-1])
            return Undone(changes[-1], tuple(undone), tuple(left))

    def _write(self, changes: Sequence[FolderChange]) -> None:
        listed = [[each.kind, [str(path) for path in each.paths], each.time_s] for each in changes]
        with contextlib.suppress(OSError, StorageError):  # a full disk costs only the undo
            make_folder(self._file.parent)
            write_atomic(self._file, json.dumps(listed).encode("utf-8", "backslashreplace"), read_back=False)
