"""Changes of files: each is one file, written completely or not at all, against the version that its editor saw.

``version`` is the hash that a page gets with a file's content, and sends back as ``If-Match``. If the file has changed
since, ``save`` raises ``EditConflict`` with both contents, and nothing is written. Each saved change can be undone: the
earlier content is kept in the program's own folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lora_rocm.errors import UserError, storage_error
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import make_folder, remove, write_atomic
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.hardware.app_dir import own_app_dir

MISSING = "missing"
"""Version of a file that does not exist."""
MAX_FILE_BYTES = 1 << 24
MAX_UNDOS = 50
"""Number of changes of one file that can be undone."""


class EditConflict(UserError):
    """The file has changed since its editor read it. Nothing was written.

    Attributes:
        path: the file.
        mine: the content that was to be saved.
        theirs: the file's present content; None if it was deleted.
        version: the version of ``theirs``.
    """

    def __init__(self, path: Path, mine: bytes, theirs: bytes | None, version: str) -> None:
        what = "This file has changed since the page read it, so nothing was saved."
        fix = "Compare both contents below, and save the one that you want."
        super().__init__("edit-conflict", what, where=str(path), fix=fix)
        self.path, self.mine, self.theirs, self.version = path, mine, theirs, version


@dataclass(frozen=True)
class SavedEdit:
    """A saved change.

    Attributes:
        path: the file.
        version: its new version.
        undo: the name under which it can be undone; empty if there is nothing to undo.
    """

    path: Path
    version: str
    undo: str


def version_of(content: bytes | None) -> str:
    """Return the version of a file with this content."""
    return MISSING if content is None else hashlib.sha256(content).hexdigest()


class Edits:
    """Saves changes of files and undoes them. Each file is changed by one thread and one process at a time."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def read(self, path: Path) -> tuple[bytes | None, str]:
        """Return a file's content and version; None and "missing" if there is no file.

        Raises:
            StorageError: the file cannot be read, or is larger than MAX_FILE_BYTES.
        """
        try:
            content: bytes | None = read_plain(path, MAX_FILE_BYTES)
        except FileNotFoundError:
            content = None
        except OSError as error:
            raise storage_error(error, path) from error
        return content, version_of(content)

    def save(self, path: Path, content: bytes | None, if_match: str) -> SavedEdit:
        """Write a file, or delete it if ``content`` is None. A file that has this content already stays as it is.

        So a change that is sent twice, as by a double click, does not conflict with itself.

        Args:
            path: the file, from ``Folders.resolve``.
            content: the complete new content.
            if_match: the version that the editor saw.

        Raises:
            EditConflict: the file has another version now.
            StorageError: the file cannot be read or written; it is unchanged.
        """
        with self._only(path):
            before, version = self.read(path)
            if before == content:
                return SavedEdit(path, version, "")
            if version != if_match:
                raise EditConflict(path, content or b"", before, version)
            undo = self._keep(path, before, version_of(content))
            self._write(path, content)
            return SavedEdit(path, version_of(content), undo)

    def undo(self, path: Path, if_match: str | None = None) -> SavedEdit:
        """Undo the newest change of a file. Undoing again undoes the change before it.

        ``if_match``: the version that the editor saw, or None if it showed no content.

        Raises:
            UserError: nothing-to-undo: no change of this file is kept.
            EditConflict: the file has changed since.
            StorageError: the file cannot be read or written.
        """
        with self._only(path):
            kept = self._kept(path)
            if not kept:
                fix = "Only changes that were saved in the page can be undone."
                raise UserError("nothing-to-undo", "There is no change to undo.", where=str(path), fix=fix)
            about = parse_json(read_plain(kept[-1], MAX_FILE_BYTES))
            before = read_plain(kept[-1].with_suffix(".before"), MAX_FILE_BYTES) if about["existed"] else None
            now, version = self.read(path)
            if version != about["after"] or version != (if_match or version):
                raise EditConflict(path, before or b"", now, version)
            self._write(path, before)
            for file in (kept[-1], kept[-1].with_suffix(".before")):
                remove(file)
            return SavedEdit(path, version_of(before), "")

    def can_undo(self, path: Path) -> bool:
        """Whether a change of this file is kept."""
        return bool(self._kept(path))

    def _write(self, path: Path, content: bytes | None) -> None:
        try:
            if content is None:
                remove(path)
            else:
                write_atomic(path, content)
        except OSError as error:
            raise storage_error(error, path) from error

    def _keep(self, path: Path, before: bytes | None, after: str) -> str:
        """Keep the earlier content, and forget the oldest one beyond MAX_UNDOS. Return its name."""
        folder, kept = self._folder(path), self._kept(path)
        number = int(kept[-1].stem) + 1 if kept else 0
        name = f"{number:06d}"
        if before is not None:
            write_atomic(folder / f"{name}.before", before)
        about = {"path": str(path), "existed": before is not None, "after": after}
        write_atomic(folder / f"{name}.json", json.dumps(about).encode("utf-8", "backslashreplace"))
        for old in kept[: len(kept) + 1 - MAX_UNDOS]:
            with contextlib.suppress(OSError):
                remove(old)
                remove(old.with_suffix(".before"))
        return name

    def _kept(self, path: Path) -> list[Path]:
        return sorted(self._folder(path).glob("*.json"))

    def _folder(self, path: Path) -> Path:
        return own_app_dir() / "ui" / "undo" / hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()[:32]

    @contextlib.contextmanager
    def _only(self, path: Path) -> Iterator[None]:
        """Let one thread of one process at a time change a file."""
        folder = self._folder(path)
        try:
            make_folder(folder)
        except OSError as error:
            raise storage_error(error, folder) from error
        with self._locks[str(path)], FileLock(folder / ".lock"):  # writes: in the program's own folder
            yield
