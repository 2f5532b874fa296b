"""Reads an event file. For a large one, an index file next to it avoids parsing it again.

The index stores the events read so far (``EventLog``). It is used only if this version of the program wrote it on this
machine and the event file still begins with the same bytes; otherwise it is silently rebuilt. So it never changes the
result, only the time. If it cannot be written, the event file is parsed each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm import __version__
from lora_rocm.errors import StorageError
from lora_rocm.foundation.bounded_read import FileVersion, check_plain, read_plain
from lora_rocm.foundation.files import write_atomic
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.rundir import event_log, event_types, events
from lora_rocm.rundir.event_log import EventLog
from lora_rocm.rundir.events import CHUNK_BYTES, EventReader, size_if_there
from lora_rocm.rundir.layout import RunDir

if TYPE_CHECKING:
    from hashlib import _Hash

INDEX_FROM_BYTES = 1 << 20
"""Minimum size for an index, because small files are parsed faster.

With this many bytes not in the index, it is rewritten.
"""
MAX_INDEX_BYTES = 1 << 30
SETTLED_S = 3.0
"""A file read less than this after its last change may change again without a new time (FAT counts 2 s)."""
STEP, STEP_WITHIN = b'"type": "step"', 64
"""The mark of a step in its line, and the number of bytes at the start that may contain it."""
KEY_FILE, KEY_BYTES, SEAL_BYTES = "index.key", 32, 32


def read_log(path: Path, *, use_index: bool = True, last_steps: int | None = None) -> EventLog:
    """Return the events of a file; an empty log if there is no file.

    Args:
        path: the event file.
        use_index: whether an index may be used.
        last_steps: number of newest steps that must be returned, or None for all. If the file has an index, all steps
            are returned.

    Raises:
        StorageError: see ``events.size_if_there``.
    """
    size = size_if_there(path) or 0
    key = _key() if use_index and INDEX_FROM_BYTES <= size <= events.MAX_EVENTS_BYTES else b""
    log, digest, indexed = EventLog(), hashlib.sha256(), 0
    version, read_s = FileVersion.of(path) if key else None, time.time()
    if version is not None and (found := _read_index(path, version, key)) is not None:
        log, digest, indexed = found
    reader, begun = EventReader(path, indexed), b""

    def hash_lines(data: bytes) -> None:
        """Hash complete lines only, because the next reader continues after the last complete line."""
        nonlocal begun
        end = data.rfind(b"\n") + 1
        if end and key:
            digest.update(begun + data[:end])
        begun = data[end:] if end else begun + data

    with contextlib.suppress(FileNotFoundError):
        lines = reader.lines(hash_lines if key else lambda data: None)
        log.read(lines if key or last_steps is None else _with_last_steps(lines, last_steps))
    log.num_bytes = reader.offset
    if version is not None and reader.offset - indexed >= INDEX_FROM_BYTES:
        about = {"program": _program(), "file": asdict(version), "read_s": read_s}
        content = log.to_bytes({**about, "offset": reader.offset, "sha256": digest.hexdigest()})
        with contextlib.suppress(StorageError):
            index = RunDir(path.parent).index_of(path)
            write_atomic(index, hmac.digest(key, content, "sha256") + content, path.parent, read_back=False)
    return log


def _with_last_steps(lines: Iterable[bytes], count: int) -> Iterator[bytes]:
    """Return the lines in order, with only the newest ``count`` steps."""
    others, steps = list[tuple[int, bytes]](), deque[tuple[int, bytes]](maxlen=count)
    for number, line in enumerate(lines):
        (steps if STEP in line[:STEP_WITHIN] else others).append((number, line))
    return (line for _, line in merge(others, steps))


def _read_index(path: Path, version: FileVersion, key: bytes) -> tuple[EventLog, _Hash, int] | None:
    """Return an index's events, the hash of the indexed lines and their size in bytes; None if it is unusable."""
    index = RunDir(path.parent).index_of(path)
    try:
        found = read_plain(index, check_plain(index, MAX_INDEX_BYTES))
    except OSError:
        return None
    content = memoryview(found)
    if not hmac.compare_digest(hmac.digest(key, content[SEAL_BYTES:], "sha256"), found[:SEAL_BYTES]):
        return None  # damaged, or written by somebody else
    end = found.index(b"\n", SEAL_BYTES)
    about = json.loads(found[SEAL_BYTES:end])  # json: the program's own file, rebuilt if it is damaged
    if about["program"] != _program():
        return None
    offset, digest = int(about["offset"]), hashlib.sha256()
    changed_s = max(version.changed_ns, version.inode_changed_ns) / 1e9
    is_same = about["file"] == asdict(version) and about["read_s"] - changed_s > SETTLED_S
    if not is_same or version.num_bytes - offset >= INDEX_FROM_BYTES:
        if not _hash_beginning(path, offset, digest) or digest.hexdigest() != about["sha256"]:
            return None
    return EventLog.from_bytes(about, content[end + 1 :]), digest, offset


def _hash_beginning(path: Path, num_bytes: int, digest: _Hash) -> bool:
    """Update ``digest`` with the first bytes of a file; return False if the file is shorter."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        while num_bytes and (piece := file.read(min(num_bytes, CHUNK_BYTES))):
            digest.update(piece)
            num_bytes -= len(piece)
    return not num_bytes


def _key() -> bytes:
    """The secret key by which this program recognises its own indexes; empty if it cannot be stored."""
    path = own_app_dir() / KEY_FILE
    with contextlib.suppress(OSError, StorageError):
        if not path.exists():
            write_atomic(path, secrets.token_bytes(KEY_BYTES))
        key = read_plain(path, KEY_BYTES)
        return key if len(key) == KEY_BYTES else b""
    return b""


@cache
def _program() -> str:
    """The version of the program.

    An index of another version is not used, because that version may parse lines differently.
    """
    found = hashlib.sha256(f"{__version__} {sys.byteorder}".encode("ascii"))
    for module in (event_types, event_log):
        with contextlib.suppress(OSError):
            found.update(Path(str(module.__file__)).read_bytes())
    return found.hexdigest()
