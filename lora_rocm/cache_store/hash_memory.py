"""Stores the hashes of files, so that unchanged files are not read again.

A file counts as unchanged if its path, size and times of change are the same.
"""

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
    """Return (size, time of the last change, time of the last inode change) of a file, for ``FileState``."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file. While the state is the same, the file's bytes are assumed to be the same.

    path: absolute path.
    changed_ns: time of the last change of the content.
    inode_changed_ns: time of the last change of the file's inode. It detects two files of equal size and time that
        swapped names, as after unpacking an archive. On Windows, it is the time of creation.
    """

    path: str
    num_bytes: int
    changed_ns: int
    inode_changed_ns: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """Return the current state of a file.

        Raises:
            OSError: the file's status cannot be read.
        """
        return cls(str(file.absolute()), *marks_of(file.stat()))

    @property
    def identity(self) -> list[Any]:
        return [self.path, self.num_bytes, self.changed_ns, self.inode_changed_ns]


class State(Protocol):
    """The key under which a hash is stored. It must differ if the bytes differ.

    changed_ns: time of the last change.
    """

    @property
    def identity(self) -> list[Any]: ...
    @property
    def changed_ns(self) -> int: ...


IMAGES_MEMORY, WEIGHTS_MEMORY = "hashes.jsonl", "weights.jsonl"


class HashMemory:
    """Stores SHA-256 hashes of files in an append-only file. The key is absolute path, size and times of change.

    The append-only file is read on first use. Each of its lines contains the line's own digest. A line that is damaged
    or incomplete after a crash is skipped, and the file it describes is hashed again. After ``begin``, any thread may
    call ``recall``.
    """

    def __init__(self, root: Path, name: str = IMAGES_MEMORY) -> None:
        self.path = root / name
        self._known: dict[bytes, bytes] | None = None

    def begin(self) -> dict[bytes, bytes]:
        """Read the stored hashes if this is the first call.

        Returns:
            The SHA-256 hashes, by digest of the file's state.
        """
        if self._known is None:
            self._known = self._read()
        return self._known

    def recall(self, state: State) -> str | None:
        """Return the stored hash (hex) of a file in this state; None if there is none."""
        known = self.begin().get(_digest(state.identity))
        return known.hex() if known is not None else None

    def remember(self, state: State, sha256: str) -> None:
        """Store a hash. A later hash of the same state replaces an earlier one.

        If the file was changed less than SETTLED_S ago, nothing is stored.

        Args:
            state: the file's state, recorded before the content was read.
            sha256: hash of the content (hex).

        Raises:
            StorageError: the hash cannot be written.
        """
        known, digest = self.begin(), _digest(state.identity)
        if known.get(digest) != bytes.fromhex(sha256) and time.time() - state.changed_ns / 1e9 > SETTLED_S:
            known[digest] = bytes.fromhex(sha256)
            self._append(remembered_line(state, sha256))

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 (hex) of a file's bytes. The file is only read if it is new or changed.

        Raises:
            OSError: the file cannot be read.
            StorageError: the hash cannot be stored.
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
                        # json: the program's own file, rebuilt if it is damaged
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
    """Return the line that stores a hash in the file of a ``HashMemory``."""
    line = [*state.identity, sha256, _line_digest(state.identity, sha256)]
    return json.dumps(line).encode("ascii") + b"\n"


def _digest(identity: list[Any]) -> bytes:
    """Return a 16-byte digest of a file's state. It saves memory if there are a million files."""
    return hashlib.blake2b(json.dumps(identity).encode("ascii"), digest_size=16).digest()


def _line_digest(identity: list[Any], sha256: Any) -> str:
    return _digest([*identity, sha256]).hex()
