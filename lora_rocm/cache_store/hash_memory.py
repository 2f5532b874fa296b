"""Remembers the hashes of files by file state: path, size and times of change."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_rocm.errors import storage_error
from lora_rocm.foundation.files import make_folder, open_in_place

MAX_LINE_BYTES = 1 << 16
SHA256_BYTES = 32
SETTLED_S = 2.0  # a file changed this recently could change again within one tick of its time stamp


def marks_of(found: os.stat_result) -> tuple[int, int, int]:
    """Size and times of change, which identify a file's state together with its path; see ``FileState``."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class FileState:
    """Identifies a file's content: while the state is the same, its bytes are too.

    inode_changed_ns: detects that two files of one size swapped names although their other times are equal, as after
        unpacking an archive. On Windows it is the time of creation.
    """

    path: str
    num_bytes: int
    changed_ns: int
    inode_changed_ns: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """The current state of a file.

        Raises:
            OSError: the file's status cannot be read.
        """
        return cls(str(file.absolute()), *marks_of(file.stat()))

    @property
    def identity(self) -> list[Any]:
        return [self.path, self.num_bytes, self.changed_ns, self.inode_changed_ns]


class State(Protocol):
    """The key of a remembered hash; differs whenever the bytes differ. changed_ns: time of the last change."""

    @property
    def identity(self) -> list[Any]: ...
    @property
    def changed_ns(self) -> int: ...


IMAGES_MEMORY, WEIGHTS_MEMORY = "hashes.jsonl", "weights.jsonl"


class HashMemory:
    """SHA-256 of files by (absolute path, size, times of change), stored in an append-only file.

    The file is read on first use. Each line carries a digest of itself: a line damaged or torn by a crash is skipped,
    and its file is hashed again. After ``begin``, ``recall`` may be called from any thread.
    """

    def __init__(self, root: Path, name: str = IMAGES_MEMORY) -> None:
        self.path = root / name
        self._known: dict[bytes, bytes] | None = None

    def begin(self) -> dict[bytes, bytes]:
        """Read the remembered hashes on the first call; returns them."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def recall(self, state: State) -> str | None:
        """The remembered hash (hex) of a file in this state; None if it is not known."""
        known = self.begin().get(_digest(state.identity))
        return known.hex() if known is not None else None

    def remember(self, state: State, sha256: str) -> None:
        """Remember the hash of content that was read after ``state`` was recorded; the last hash of a state counts.

        A file changed less than SETTLED_S ago is not remembered.

        Raises:
            StorageError: the memory cannot be written.
        """
        known, digest = self.begin(), _digest(state.identity)
        if known.get(digest) != bytes.fromhex(sha256) and time.time() - state.changed_ns / 1e9 > SETTLED_S:
            known[digest] = bytes.fromhex(sha256)
            self._append(remembered_line(state, sha256))

    def sha256(self, file: Path) -> str:
        """The hash of a file's bytes; reads the file only if it is new or changed.

        Raises:
            OSError: the file cannot be read.
            StorageError: the memory cannot be written.
        """
        state = FileState.of(file)
        known = self.recall(state)
        if known is not None:
            return known
        with file.open("rb") as opened:
            computed = hashlib.file_digest(opened, "sha256").hexdigest()
        self.remember(state, computed)
        return computed

    def _read(self) -> dict[bytes, bytes]:
        known = {}
        try:
            with self.path.open("rb") as file:
                for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                    try:
                        *identity, sha256, digest = json.loads(line)
                        content = bytes.fromhex(sha256)
                    except (ValueError, TypeError, RecursionError):
                        continue
                    if digest == _line_digest(identity, sha256) and len(content) == SHA256_BYTES:
                        known[_digest(identity)] = content
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(error, self.path) from error
        return known

    def _append(self, line: bytes) -> None:
        try:
            make_folder(self.path.parent)
            with open_in_place(self.path) as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # torn by a crash
                        file.write(b"\n")
                file.write(line)
        except OSError as error:
            raise storage_error(error, self.path) from error


def remembered_line(state: State, sha256: str) -> bytes:
    """A line of the hash memory's file."""
    line = [*state.identity, sha256, _line_digest(state.identity, sha256)]
    return json.dumps(line).encode("ascii") + b"\n"


def _digest(identity: list[Any]) -> bytes:
    """A short digest of a file's state, to save memory: there may be a million."""
    return hashlib.blake2b(json.dumps(identity).encode("ascii"), digest_size=16).digest()


def _line_digest(identity: list[Any], sha256: Any) -> str:
    return _digest([*identity, sha256]).hex()
