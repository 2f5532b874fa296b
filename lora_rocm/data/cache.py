"""What the encoders made, kept between runs: content-addressed, atomic, fingerprinted.

An entry is trusted only as far as its fingerprints go: whatever does not match is CacheEntryBad, and is encoded again
by whoever asked. Entries are read whole, not mapped (a mapped file cannot be repaired on Windows), and never replaced:
a repaired entry gets the next name (``key.safetensors``, ``key-1.safetensors``, ...) and the last good one counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lora_rocm.data.entries import (
    METADATA_KEY,
    SPEC_VERSION,
    CacheEntryBad,
    check_place,
    metadata_text,
    read_entry,
    read_header,
)
from lora_rocm.device.transfer import fingerprint
from lora_rocm.errors import DataError, storage_error
from lora_rocm.host.files import make_folder, open_in_place, write_atomic

if TYPE_CHECKING:
    from lora_rocm.data.buckets import Geometry
    from lora_rocm.data.entry_spec import TensorSpec

MARK_AFTER_S = (
    24 * 3600
)  # the time of change of a file says, to the day, when a run last wanted it: for ``cache prune``
MAX_LINE_BYTES = 1 << 16
MISSING = "missing"
SHA256_BYTES = 32
SETTLED_S = 2.0  # a file changed this recently could change again within one tick of its time stamp


@dataclass(frozen=True)
class CachedItem:
    """One entry: CPU tensors without a batch dimension, and the fingerprint of each, computed when it was encoded."""

    tensors: dict[str, Tensor]
    fingerprints: dict[str, int]


def entry_key(entry: str, inputs: Sequence[Any], encoder_fingerprint: str) -> str:
    """Key of an entry: its name, what it is made from (``image_parts``, a caption, or both), and what encodes it."""
    parts = [SPEC_VERSION, entry, *inputs, encoder_fingerprint]
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:40]


def image_parts(image_sha256: str, geometry: Geometry, flip: bool) -> tuple[Any, ...]:
    """What says which image is encoded: its bytes and how it is cut."""
    return image_sha256, (geometry.resized_hw, geometry.crop_top_left, geometry.target_hw, flip)


class LatentCache:
    """Entries under ``root/<kind>/<first two of the key>/``; the kind is ``EntrySpec.name``.

    Attributes:
        written: kind -> (entries, bytes) that were written through this object.
        writing: the kind whose entries are being made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: dict[str, tuple[int, int]] = {}
        self.writing = ""

    def has(self, kind: str, key: str) -> bool:
        """Whether there is an entry that looks whole from outside."""
        return not self.fault(kind, key)

    def fault(self, kind: str, key: str) -> str:
        """What is wrong with an entry as seen from outside: MISSING, a damage, or nothing (empty).

        Its header is read, and that its size is that which the header says; its bytes are checked by ``get``.
        """
        names = self._names(kind, key)
        if not names:
            return MISSING
        try:
            read_header(names[-1])
        except (OSError, CacheEntryBad) as error:
            return f"{names[-1]}: {error}"
        _mark_used(names[-1])
        return ""

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], item: str) -> None:
        """Write an entry: ``content_of``, then ``write``."""
        self.write(kind, key, self.content_of(kind, key, tensors, item))

    def content_of(self, kind: str, key: str, tensors: Mapping[str, Tensor], item: str) -> bytes:
        """The bytes of an entry.

        Args:
            kind: name of the entry.
            key: from ``entry_key``.
            tensors: CPU tensors without a batch dimension.
            item: the image or caption, for the error.

        Raises:
            DataError: "encoder-nonfinite".
        """
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise DataError(
                    "encoder-nonfinite",
                    f"The encoder made values of {name} that are not finite.",
                    where=item,
                    fix="The encoder's weights are damaged (download the model again), or this machine computes "
                    "wrongly (try runtime.device: cpu).",
                )
        stored = {name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}
        fingerprints = {name: int(fingerprint(tensor[None])) for name, tensor in stored.items()}
        return save(stored, {METADATA_KEY: metadata_text(kind, key, fingerprints)})

    def write(self, kind: str, key: str, content: bytes) -> None:
        """Write an entry, whole or not at all; nothing where another run has just written the same.

        Raises:
            StorageError: disk full, no permission.
        """
        names = self._names(kind, key)
        if not names or not _holds(names[-1], content):
            write_atomic(self._path(kind, key, len(names)), content, read_back=False)
            entries, written_bytes = self.written.get(kind, (0, 0))
            self.written[kind] = (entries + 1, written_bytes + len(content))

    def get(self, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
        """Read an entry and check everything about it; of several the newest good one.

        Raises:
            CacheEntryBad: there is no entry that is as it was written and as ``spec`` wants it.
        """
        reasons = []
        for path in reversed(self._names(kind, key)):
            try:
                return _checked(path, kind, key, spec)
            except OSError as error:
                reasons.append(f"{path}: {error}")
            except CacheEntryBad as error:
                reasons.append(f"{path}: {error}")
        raise CacheEntryBad("; ".join(reasons) or f"{self._path(kind, key, 0)}: {MISSING}")

    def _path(self, kind: str, key: str, repair: int) -> Path:
        return self.root / kind / key[:2] / f"{key}{f'-{repair}' if repair else ''}.safetensors"

    def _names(self, kind: str, key: str) -> list[Path]:
        """What lies under the names of an entry, oldest first: a folder or a link takes up a name too."""
        names: list[Path] = []
        while os.path.lexists(path := self._path(kind, key, len(names))):
            names.append(path)
        return names


def _mark_used(path: Path) -> None:
    """Note the day on which an entry was wanted, where the cache may be written."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > MARK_AFTER_S:
            os.utime(path)


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file has exactly these bytes."""
    try:
        return read_entry(path)[1] == content
    except (OSError, CacheEntryBad):
        return False


def _checked(path: Path, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
    """The entry in a file, if every tensor is the one that was written and the one that is wanted."""
    header, content = read_entry(path)
    check_place(header, kind, key)
    if header.spec_version != SPEC_VERSION:
        raise CacheEntryBad(f"it is of version {header.spec_version}, not {SPEC_VERSION}")
    if header.spans.keys() != set(spec):
        raise CacheEntryBad(f"it holds {sorted(header.spans)}, not {sorted(spec)}")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise CacheEntryBad(f"it cannot be read ({error})") from error
    for name, tensor in tensors.items():
        if tensor.dtype != getattr(torch, spec[name].dtype) or tensor.ndim != len(spec[name].dims):
            raise CacheEntryBad(f"{name} is {tensor.dtype} of {tensor.ndim} dimensions")
        if int(fingerprint(tensor[None])) != header.fingerprints[name]:
            raise CacheEntryBad(f"{name} is not as it was written")
    return CachedItem(tensors, header.fingerprints)


def marks_of(found: os.stat_result) -> tuple[int, int, int]:
    """What a file is known by, besides its name; see ``FileState``."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file is known by: as long as these are the same, so are its bytes.

    inode_changed_ns: files that come out of one archive have the same times, and those without compression the same
    sizes; of two that exchange their names this alone tells (on Windows it is the time at which the file was made).
    """

    path: str
    num_bytes: int
    changed_ns: int
    inode_changed_ns: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """Of a file now.

        Raises:
            OSError: it cannot be looked at.
        """
        return cls(str(file.absolute()), *marks_of(file.stat()))

    @property
    def identity(self) -> list[Any]:
        return [self.path, self.num_bytes, self.changed_ns, self.inode_changed_ns]


class State(Protocol):
    """What is remembered by: changes whenever the bytes do. changed_ns: when they did."""

    @property
    def identity(self) -> list[Any]: ...
    @property
    def changed_ns(self) -> int: ...


class HashMemory:
    """SHA-256 of files, remembered by (absolute path, size, times of change) in ``hashes.jsonl``, which only grows.

    The file is read when it is first asked. Each line carries a digest of itself: one that was torn by a crash or
    damaged is skipped, and its file is hashed again. ``recall`` may be called in any thread once ``begin`` was.
    """

    def __init__(self, root: Path, name: str = "hashes.jsonl") -> None:
        self.path = root / name
        self._known: dict[bytes, bytes] | None = None

    def begin(self) -> dict[bytes, bytes]:
        """Read what is remembered, once."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def recall(self, state: State) -> str | None:
        """The hash (hex) of a file that has been in this state before."""
        known = self.begin().get(_digest(state.identity))
        return known.hex() if known is not None else None

    def remember(self, state: State, sha256: str) -> None:
        """Keep the hash of what was read from a file after it was found in this state; of two the last counts.

        Raises:
            StorageError: the memory cannot be written.
        """
        known, digest = self.begin(), _digest(state.identity)
        if known.get(digest) != bytes.fromhex(sha256) and time.time() - state.changed_ns / 1e9 > SETTLED_S:
            known[digest] = bytes.fromhex(sha256)
            self._append(remembered_line(state, sha256))

    def sha256(self, file: Path) -> str:
        """The hash of a file's bytes, read only if the file is new or changed.

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
    """A line of the memory of hashes."""
    line = [*state.identity, sha256, _line_digest(state.identity, sha256)]
    return json.dumps(line).encode("ascii") + b"\n"


def _digest(identity: list[Any]) -> bytes:
    """A short name for a file's state: a million of them take little memory."""
    return hashlib.blake2b(json.dumps(identity).encode("ascii"), digest_size=16).digest()


def _line_digest(identity: list[Any], sha256: Any) -> str:
    return _digest([*identity, sha256]).hex()
