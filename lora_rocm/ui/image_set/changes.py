"""A journal of the changes in a folder, so that the newest one can be undone, whether it changed one file or many.

Each file is saved on its own by ``Edits``, which keeps its earlier content. The journal only has the names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lora_rocm.errors import StorageError, UserError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import make_folder, write_atomic
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.ui.edits import Edits

MAX_CHANGES, MAX_JOURNAL_BYTES = 30, 1 << 25
THREADS, FILES_AT_ONCE = 8, 64


Advance = Callable[[int, int], None]
"""Is called with the number of finished files and of all; it may raise to cancel."""
T = TypeVar("T")


def for_each(items: Sequence[T], function: Callable[[T], None], advance: Advance) -> None:
    """Call a function for many files, several at a time, because each waits for the disk.

    Raises:
        LoraRocmError: one of the calls, or ``advance``, failed. The calls before it have ended.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(items), FILES_AT_ONCE):
            advance(start, len(items))
            list(pool.map(function, items[start : start + FILES_AT_ONCE]))
    advance(len(items), len(items))


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

    @property
    def version(self) -> str:
        """A text that differs after each change and each undo; empty if no change is known."""
        return "".join(f"{each.time_s!r}" for each in self.changes()[-1:])

    def require_change(self, if_match: str | None = None) -> list[FolderChange]:
        """Return the changes, of which there is at least one.

        ``if_match``: the version that the page shows, or None for any.

        Raises:
            UserError: nothing-to-undo: no change is known; or edit-conflict: the newest change is another one.
        """
        if if_match is not None and if_match != self.version:
            what = "The newest change in this folder is one that this page has not shown. Nothing was undone."
            fix = "Reload the page to see it. Undo then takes that change back."
            raise UserError("edit-conflict", what, fix=fix)
        if not (changes := self.changes()):
            fix = "Only changes that were saved in the page can be undone."
            raise UserError("nothing-to-undo", "There is no change to undo.", fix=fix)
        return changes

    def undo(self, advance: Advance = lambda done, total: None, if_match: str | None = None) -> Undone:
        """Undo the newest change. If ``advance`` raises to cancel, the other files can be undone later.

        ``if_match``: see ``require_change``.

        Raises:
            UserError: see ``require_change``.
            StorageError: a file cannot be read or written.
        """
        with self._lock:
            changes = self.require_change(if_match)
            newest, undone, left = changes[-1], list[Path](), list[Path]()

            def undo(path: Path) -> None:
                try:
                    self._edits.undo(path)
                    undone.append(path)
                except UserError:  # it was changed since, or too often
                    left.append(path)

            try:
                for_each(newest.paths, undo, advance)
            finally:
                rest = {*newest.paths} - {*undone, *left}
                others = [replace(newest, paths=tuple(sorted(rest)))] if rest else []
                self._write([*changes[:-1], *others])
            return Undone(newest, tuple(sorted(undone)), tuple(sorted(left)))

    def _write(self, changes: Sequence[FolderChange]) -> None:
        listed = [[each.kind, [str(path) for path in each.paths], each.time_s] for each in changes]
        with contextlib.suppress(OSError, StorageError):  # a full disk costs only the undo
            make_folder(self._file.parent)
            write_atomic(self._file, json.dumps(listed).encode("utf-8", "backslashreplace"), read_back=False)
