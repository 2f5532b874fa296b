"""Reads and writes the header of a safetensors file. No other module does. Imports only the standard library.

Format: header size (8 bytes, little-endian), JSON header, bytes of the tensors (safetensors specification). Headers
are not trusted, so they are checked: every byte of the data must belong to exactly one tensor, and each tensor must
have the size of its shape. Offsets and shapes that were returned are valid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.foundation.terminal_text import printable

MAX_HEADER_BYTES = 1 << 24  # the specification allows 100 MB; the header of SDXL in one file has 0.3
MAX_DIMENSIONS = 8
ALIGNMENT_BYTES = 8
MAX_NAME_LETTERS = 1000  # the longest names of published files have 130
FOREIGN = {
    b"PK\x03\x04": "a zip archive, which torch.save writes",
    b"GGUF": "a GGUF file, which is not supported",
    b"version ": "a Git LFS pointer to the file",
    b"<!DOCTYP": "a web page",
    b"<!doctyp": "a web page",
}
"""Descriptions of files that are not safetensors files, keyed by their first bytes (at most eight)."""
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


class DamagedHeader(Exception):
    """The file is not a complete safetensors file. The message is the reason."""


class OtherFile(DamagedHeader):
    """The file is of another kind. The message describes it."""


class UnknownDtype(DamagedHeader):
    """The file has a tensor with an unsupported dtype, which is the message."""


@dataclass(frozen=True)
class TensorEntry:
    """The header's entry for a tensor. begin, end: offsets of its data from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(file: BinaryIO, num_bytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors by name, and the metadata. ``num_bytes``: size of the file.

    Raises:
        DamagedHeader: the header is invalid, or does not match the file's size.
        OSError: the file cannot be read.
    """
    # Read the JSON header.
    start = file.read(8)
    if (kind := next((kind for first, kind in FOREIGN.items() if start.startswith(first)), None)) is not None:
        raise OtherFile(kind)
    length = int.from_bytes(start, "little")
    if num_bytes < 8 or length > min(num_bytes - 8, MAX_HEADER_BYTES):
        raise DamagedHeader("it ends inside its header")
    try:
        fields = parse_json(file.read(length))
        metadata = fields.pop("__metadata__", {})
        _require_short(fields)
        tensors = {name: _entry(value, 8 + length) for name, value in fields.items()}
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError("metadata are texts")
        "".join((*tensors, *metadata, *metadata.values())).encode("utf-8")  # refuses lone surrogates in names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error}" if isinstance(error, BadJson) else ""
        raise DamagedHeader(f"its header is not readable{why}") from error
    # Check that the tensors cover the data without gaps and overlaps.
    at = 8 + length
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.dtype not in DTYPE_BYTES:
            raise UnknownDtype(printable(entry.dtype)[:40])
        if math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] != entry.end - entry.begin:
            raise DamagedHeader(f"the size of {printable(name):.100} does not match its shape")
        if entry.begin != at:
            raise DamagedHeader("its tensors overlap or leave a gap")
        at = entry.end
    if at != num_bytes:
        raise DamagedHeader(f"its size of {num_bytes:,} bytes does not match its header")
    return tensors, metadata


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return all bytes of a safetensors file that precede the data. Metadata are sorted.

    ``tensors``: (name, dtype, shape) in the order of the file.
    """
    fields: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * DTYPE_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % ALIGNMENT_BYTES)
    return len(raw).to_bytes(8, "little") + raw


def _require_short(names: Iterable[str]) -> None:
    """Refuse overlong tensor names, because later searches in them with regular expressions would take minutes."""
    longest = max(map(len, names), default=0)
    if longest > MAX_NAME_LETTERS:
        raise DamagedHeader(f"a tensor's name has {longest:,} letters, which is too long")


def _entry(value: dict[str, Any], data_start: int) -> TensorEntry:
    begin, end = value["data_offsets"]
    shape = value["shape"]
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape)):
        raise ValueError("there are too many sizes, or one is not a whole number")
    if not isinstance(value["dtype"], str):
        raise TypeError("the number format is not a name")
    return TensorEntry(value["dtype"], tuple(shape), data_start + begin, data_start + end)
