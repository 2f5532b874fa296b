"""Copies LoRA files for publication: the same tensors, without private metadata (``public_metadata.toml``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PureWindowsPath

from lora_rocm.errors import AdapterError, StorageError, storage_error
from lora_rocm.foundation.files import write_pieces
from lora_rocm.foundation.redact import Private
from lora_rocm.foundation.safetensors_header import header_bytes
from lora_rocm.foundation.tables import read_table
from lora_rocm.model_files.header import TensorFileHeader, read_header

PIECE_BYTES = 1 << 24
OF_FILES = ("ss_sd_model_name", "ss_vae_name")
"""Fields with a file name, in which some trainers write the whole path."""


@dataclass(frozen=True)
class PublicFields:
    """The table ``public_metadata.toml``."""

    beginnings: tuple[str, ...]
    dropped: tuple[str, ...]
    checksums: tuple[str, ...]
    kept: tuple[str, ...]

    def allows(self, name: str) -> bool:
        """Whether a field may be published."""
        return name in self.kept or (name.startswith(self.beginnings) and name not in self.dropped)


@cache
def _fields() -> PublicFields:
    return read_table(Path(__file__).with_suffix(".toml"), PublicFields)


def public_metadata(metadata: Mapping[str, str], private: Private) -> dict[str, str]:
    """Return the fields that may be published. Paths and tokens in their texts are replaced."""
    fields, found = _fields(), {}
    for name, text in metadata.items():
        if fields.allows(name):
            text = PureWindowsPath(text).name if name in OF_FILES else text
            found[name] = text if name in fields.checksums else private.text(text)
    return found


def write_public_copy(source: Path, target: Path, private: Private) -> None:
    """Copy a safetensors file without private metadata, and compare the bytes of its tensors.

    Raises:
        AdapterError: weights-damaged, weights-unreadable: the file cannot be copied.
        StorageError: the copy cannot be written, or differs.
    """
    header = read_header(source, AdapterError)
    in_order = sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    start = header_bytes(
        ((name, entry.dtype, entry.shape) for name, entry in in_order), public_metadata(header.metadata, private)
    )
    try:
        write_pieces(target, _whole(start, header))
        copy = read_header(target, AdapterError)
        same = copy.shapes == header.shapes and _digest(copy) == _digest(header)
    except OSError as error:
        raise storage_error(error, error.filename or target) from error
    if not same:
        raise StorageError(
            "written-differs",
            "The copied tensors differ from the tensors in the file.",
            where=str(target),
            fix="Check the disk and the memory of the machine, then run the same command again.",
        )


def _whole(start: bytes, header: TensorFileHeader) -> Iterator[bytes]:
    yield start
    yield from _pieces(header)


def _pieces(header: TensorFileHeader) -> Iterator[bytes]:
    """Yield the bytes of a file's tensors, in pieces."""
    with header.path.open("rb") as file:
        file.seek(min((entry.begin for entry in header.tensors.values()), default=header.version.num_bytes))
        while piece := file.read(PIECE_BYTES):
            yield piece


def _digest(header: TensorFileHeader) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(header):
        digest.update(piece)
    return digest.hexdigest()
