"""Safetensors files read by hand: header, plain reads (never a mapped file), and the identity of their content.

Format: 8 bytes little-endian header size, a JSON header, then the tensors' bytes (safetensors specification).
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from lora_rocm.errors import ModelError, UserError
from lora_rocm.host.plain import check_plain
from lora_rocm.host.printable import printable

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
MAX_HEADER_BYTES = 1 << 24  # the specification allows 100 MB; the header of SDXL in one file has 0.3
MAX_DIMENSIONS = 8
SAMPLE_BYTES = 64 * 1024
KOHYA_HASH_OFFSET, KOHYA_HASH_BYTES = 0x100000, 0x10000


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``begin`` and ``end`` are offsets in the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of one safetensors file."""

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    def shape(self, name: str) -> tuple[int, ...] | None:
        entry = self.tensors.get(name)
        return None if entry is None else entry.shape


def damaged(path: Path, reason: str, error: type[UserError] = ModelError) -> UserError:
    """The error of a safetensors file that is not whole."""
    return error(
        "weights-damaged",
        f"This safetensors file is damaged: {reason}.",
        where=str(path),
        fix="Download or copy the file again; a broken download is the usual cause.",
    )


def read_header(path: Path, error: type[UserError] = ModelError) -> Header:
    """Read and check a header: the sizes must add up to the size of the file.

    Raises:
        ModelError: weights-damaged, or weights-unreadable (``error`` names another branch of the tree).
    """
    try:
        size = check_plain(path, sys.maxsize)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(path, "it ends inside its header", error)
            raw = file.read(length)
    except OSError as problem:
        raise error("weights-unreadable", f"Cannot read the file: {problem.strerror}.", where=str(path)) from problem
    try:
        fields = json.loads(raw, object_pairs_hook=_without_doubles)
        metadata = fields.pop("__metadata__", {})
        tensors = {name: _entry(value, 8 + length) for name, value in fields.items()}
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError("metadata are texts")
        "".join((*tensors, *metadata, *metadata.values())).encode("utf-8")  # half of a letter is no name
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise damaged(path, "its header is not readable", error) from problem
    if any(entry.dtype not in DTYPES for entry in tensors.values()):
        raise damaged(path, "it holds a number format that is not known", error)
    _check_spans(path, tensors, 8 + length, size, error)
    return Header(path, tensors, metadata)


def _entry(value: dict[str, Any], data_start: int) -> TensorEntry:
    begin, end = value["data_offsets"]
    shape = value["shape"]
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape)):
        raise ValueError("sizes are whole numbers, and few")
    return TensorEntry(str(value["dtype"]), tuple(shape), data_start + begin, data_start + end)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")  # readers differ in which of them counts
    return found


def _check_spans(
    path: Path, tensors: dict[str, TensorEntry], data_start: int, size: int, error: type[UserError]
) -> None:
    """Every byte of the data belongs to one tensor, and every tensor has the bytes that its shape needs."""
    at = data_start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if math.prod(entry.shape) * DTYPES[entry.dtype].itemsize != entry.end - entry.begin:
            raise damaged(path, f"the size of {printable(name):.100} does not fit its shape", error)
        if entry.begin != at:
            raise damaged(path, "its tensors overlap or leave a gap", error)
        at = entry.end
    if at != size:
        raise damaged(path, f"it has {size:,} bytes, which is not what its header says", error)


def indexed(index: Mapping[str, Any], path: Path) -> list[str]:
    """The names of the files in an index of weights: all beside it, for nothing else belongs to the model.

    Raises:
        ModelError: it names something else.
    """
    named = index.get("weight_map")
    names = list(named.values()) if isinstance(named, dict) else [None]
    if not all(isinstance(name, str) and PureWindowsPath(name).name == name not in ("", "..") for name in names):
        raise damaged(path, "it does not name files beside it")
    return sorted(set(names))


def read_tensors(
    header: Header, wanted: Callable[[str], bool] = lambda name: True, error: type[UserError] = ModelError
) -> dict[str, Tensor]:
    """Read tensors with plain reads into memory of their own, in the order of the file.

    Raises:
        ModelError: weights-damaged, when the file ends early.
    """
    tensors = {}
    entries = sorted((item for item in header.tensors.items() if wanted(item[0])), key=lambda item: item[1].begin)
    with header.path.open("rb") as file:
        for name, entry in entries:
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            if tensor.numel():
                file.seek(entry.begin)
                if file.readinto(tensor.reshape(-1).view(torch.uint8).numpy()) != entry.end - entry.begin:
                    raise damaged(header.path, f"it ends inside {name}", error)
            tensors[name] = tensor
    return tensors


def identity(headers: Iterable[Header], wanted: Callable[[str], bool] = lambda name: True) -> str:
    """A sha256 (hex) that changes when any tensor changes, without reading gigabytes.

    Of every tensor the name, the number format, the shape and three samples of 64 KiB (start, middle, end) are hashed:
    small tensors are hashed whole, and retraining, merging or replacing a component is always seen. An edit of a few
    bytes in the unsampled part of a large tensor would not be; no tool makes such an edit.
    """
    digest = hashlib.sha256()
    for header in headers:
        with header.path.open("rb") as file:
            for name, entry in sorted(header.tensors.items()):
                if not wanted(name):
                    continue
                digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
                for begin, end in _samples(entry):
                    file.seek(begin)
                    digest.update(file.read(end - begin))
    return digest.hexdigest()


def _samples(entry: TensorEntry) -> Sequence[tuple[int, int]]:
    if entry.end - entry.begin <= 3 * SAMPLE_BYTES:
        return [(entry.begin, entry.end)]
    middle = (entry.begin + entry.end - SAMPLE_BYTES) // 2
    return [(start, start + SAMPLE_BYTES) for start in (entry.begin, middle, entry.end - SAMPLE_BYTES)]


def legacy_model_hash(path: Path) -> str:
    """The short hash that A1111 and kohya show for a checkpoint: sha256 of 64 KiB at 1 MiB, first 8 hex digits."""
    with path.open("rb") as file:
        file.seek(KOHYA_HASH_OFFSET)
        return hashlib.sha256(file.read(KOHYA_HASH_BYTES)).hexdigest()[:8]
