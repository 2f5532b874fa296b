"""Reads and hashes safetensors files. They are read into new memory, never memory-mapped.

A digest covers every byte of the tensors. A few threads read and hash tensors in parallel. Both release the
interpreter lock, so the digest adds almost nothing to the load time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from lora_rocm.device.host_threads import threads_of_one_core
from lora_rocm.errors import ModelError, StorageError, UserError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.header import TensorFileHeader, damaged

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Looked = TypeVar("Looked")
READERS = 12  # threads: enough to hash what a fast disk reads, and few enough to limit seeks on a slow one
RUN_BYTES = 64 << 20  # read by one thread as one task
PIECE_BYTES = 4 << 20  # read to be hashed alone, into a buffer that stays in the CPU's cache
READ_BYTES = 64 << 20
"""Bytes of a tensor that are read, then hashed. A thread takes Python's lock for each piece, and each time delays the
thread that starts the run. With 12 readers at work, that took 5.7 times as long with pieces of 4 MiB, and 1.1 times
with these.
"""
KOHYA_HASH_OFFSET, KOHYA_HASH_BYTES = 0x100000, 0x10000


def read_tensors(
    header: TensorFileHeader, wanted: Callable[[str], bool] = lambda name: True, error: type[UserError] = ModelError
) -> dict[str, Tensor]:
    """Return the tensors of a file by name, in the order of the file. They are read into new memory.

    Raises:
        ModelError: weights-damaged: the file ends early. ``error`` replaces the class.
    """
    tensors = {}
    with header.path.open("rb") as file:
        for name, entry in _in_order(header, wanted):
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            file.seek(entry.begin)
            _fill(file, _bytes_of(tensors[name]), header, name, error)
    return tensors


def read_hashed(
    headers: Sequence[TensorFileHeader],
    wanted: Callable[[str], bool],
    take: Callable[[str, Tensor], None],
    reusable: Callable[[str], bool] = lambda name: False,
) -> str:
    """Read tensors, pass each to ``take``, and return a digest of all their bytes.

    Args:
        headers: headers of the files.
        wanted: returns whether to read the tensor with a given name.
        take: called with the name and data of each tensor, in any order and from several threads.
        reusable: returns whether ``take`` keeps no reference to the tensor with a given name. A thread reads all such
            tensors into the same buffer, because new memory costs as much time as reading: the system clears each page.

    Raises:
        ModelError: weights-damaged.
        StorageError: weights-changed: a file changed after its header was read.
    """
    memory = _Reused()

    def read_tensor(file: BinaryIO, header: TensorFileHeader, name: str, entry: TensorEntry) -> str:
        made = memory.empty if reusable(name) else torch.empty
        tensor = made(entry.shape, dtype=DTYPES[entry.dtype])
        place, sha256 = _bytes_of(tensor), hashlib.sha256()
        file.seek(entry.begin)
        for start in range(0, len(place), READ_BYTES):
            piece = place[start : start + READ_BYTES]
            _fill(file, piece, header, name)
            sha256.update(piece)
        take(name, tensor)
        return sha256.hexdigest()

    return _combined(headers, _by_threads(headers, wanted, read_tensor))


class _Reused(threading.local):
    """A buffer per thread. It contains one tensor at a time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(*shape)


def digest(headers: Sequence[TensorFileHeader], wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Return a SHA-256 (hex) of the tensors: every byte, their names, dtypes and shapes.

    It does not depend on how the tensors are distributed over files.

    Raises:
        ModelError: weights-damaged.
        StorageError: weights-changed.
    """

    def read_tensor(file: BinaryIO, header: TensorFileHeader, name: str, entry: TensorEntry) -> str:
        sha256, left = hashlib.sha256(), entry.end - entry.begin
        place = memoryview(bytearray(min(left, PIECE_BYTES)))
        file.seek(entry.begin)
        while left:
            piece = place[:left]
            _fill(file, piece, header, name)
            sha256.update(piece)
            left -= len(piece)
        return sha256.hexdigest()

    return _combined(headers, _by_threads(headers, wanted, read_tensor))


def _combined(headers: Iterable[TensorFileHeader], sha256_of: Mapping[str, str]) -> str:
    combined = hashlib.sha256()
    entries = {name: entry for header in headers for name, entry in header.tensors.items()}
    for name, sha256 in sorted(sha256_of.items()):
        entry = entries[name]
        combined.update(json.dumps([name, entry.dtype, entry.shape, sha256]).encode("ascii"))
    return combined.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(bytearray())


def _fill(
    file: BinaryIO, place: memoryview, header: TensorFileHeader, name: str, error: type[UserError] = ModelError
) -> None:
    if file.readinto(place) != len(place):  # type: ignore[attr-defined]
        raise damaged(header.path, f"it ends inside {name}", error)


def _in_order(header: TensorFileHeader, wanted: Callable[[str], bool]) -> list[tuple[str, TensorEntry]]:
    """Return (name, entry) of the wanted tensors, in the order of the file."""
    return sorted((item for item in header.tensors.items() if wanted(item[0])), key=lambda item: item[1].begin)


def _by_threads(
    headers: Sequence[TensorFileHeader],
    wanted: Callable[[str], bool],
    read_tensor: Callable[[BinaryIO, TensorFileHeader, str, TensorEntry], Looked],
) -> dict[str, Looked]:
    """Call ``read_tensor`` for every wanted tensor in several threads, and return the results by tensor name.

    A file that changes meanwhile is refused.
    """

    def through(header: TensorFileHeader, names: Sequence[str]) -> list[Looked]:
        try:
            with header.path.open("rb") as file:
                _require_version(header, os.fstat(file.fileno()))
                return [read_tensor(file, header, name, header.tensors[name]) for name in names]
        except OSError as problem:
            what = f"Cannot read the file: {problem.strerror}."
            fix = "Check the disk and that the file is still there, then run the same command again."
            raise ModelError("weights-unreadable", what, where=str(header.path), fix=fix) from problem

    # runs of neighbouring tensors, one per task
    found: dict[str, Looked] = {}
    with threads_of_one_core(READERS) as pool:
        runs = [(header, names) for header in headers for names in _runs(header, wanted)]
        pieces = [(header, names, pool.submit(through, header, names)) for header, names in runs]
        for header, names, piece in pieces:
            for name, looked in zip(names, piece.result(), strict=True):
                if name in found:
                    raise damaged(header.path, f"{printable(name):.100} is in another file of the model, too")
                found[name] = looked
    # No file may have changed while it was read
    for header in headers:
        try:
            # fstat, because by name Windows may report another number for the same file
            with header.path.open("rb") as file:
                _require_version(header, os.fstat(file.fileno()))
        except OSError as problem:
            raise _changed(header) from problem
    return found


def _runs(header: TensorFileHeader, wanted: Callable[[str], bool]) -> Iterator[list[str]]:
    """Yield lists of names of neighbouring tensors. Each list is one task for a thread."""
    names: list[str] = []
    num_bytes = 0
    for name, entry in _in_order(header, wanted):
        if names and num_bytes + entry.end - entry.begin > RUN_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += entry.end - entry.begin
    if names:
        yield names


def _require_version(header: TensorFileHeader, found: os.stat_result) -> None:
    """Refuse a file that changed after its header was read. Changes of permissions and hard links are accepted."""
    now = FileVersion.of(header.path, found)
    before = header.version
    if (now.num_bytes, now.changed_ns, now.inode) != (before.num_bytes, before.changed_ns, before.inode):
        raise _changed(header)


def _changed(header: TensorFileHeader) -> StorageError:
    return StorageError(
        "weights-changed",
        "This file changed while it was being read.",
        where=str(header.path),
        fix="Wait until no program writes to it, then run the same command again.",
    )


def legacy_hash(file: BinaryIO) -> str:
    """Return the short hash of a file that A1111 and kohya use.

    It is the first 8 hex digits of the SHA-256 of the 64 KiB that start at 1 MiB.
    """
    file.seek(KOHYA_HASH_OFFSET)
    return hashlib.sha256(file.read(KOHYA_HASH_BYTES)).hexdigest()[:8]


def legacy_model_hash(path: Path) -> str:
    """Return the short hash (``legacy_hash``) of a checkpoint file."""
    with path.open("rb") as file:
        return legacy_hash(file)
