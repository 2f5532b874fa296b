"""Cache of encoder outputs across runs: content-addressed, written atomically, fingerprinted.

An entry is trusted only if its fingerprints match; otherwise ``get`` raises CacheEntryBad and its caller encodes the
entry again. Entries are read whole, not memory-mapped: a mapped file cannot be repaired on Windows. They are never
replaced: a repaired entry gets the next name (``key.safetensors``, ``key-1.safetensors``, ...), and the last good one
counts.
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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lora_rocm.cache_store.entry_file import (
    METADATA_KEY,
    SPEC_VERSION,
    CacheEntryBad,
    check_place,
    metadata_text,
    read_entry,
    read_header,
)
from lora_rocm.device.transfer import fingerprint
from lora_rocm.errors import DataError
from lora_rocm.foundation.files import write_atomic

if TYPE_CHECKING:
    from lora_rocm.dataset.entry_spec import TensorSpec
    from lora_rocm.dataset.images.buckets import Geometry

MARK_AFTER_S = 24 * 3600  # an entry's mtime records, to the day, when a run last used it, for ``cache prune``
MISSING = "missing"


@dataclass(frozen=True)
class CachedItem:
    """One entry: CPU tensors without a batch dimension, and their fingerprints, computed when they were encoded."""

    tensors: dict[str, Tensor]
    fingerprints: dict[str, int]


def entry_key(entry: str, inputs: Sequence[Any], encoder_fingerprint: str) -> str:
    """Key of an entry: a hash of its name, its inputs (``image_parts``, a caption, or both) and its encoder."""
    parts = [SPEC_VERSION, entry, *inputs, encoder_fingerprint]
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:40]


def image_parts(
    image_sha256: str, geometry: Geometry, flip: bool, colours: tuple[str, float] | None = None
) -> tuple[Any, ...]:
    """The parts of a key that identify an encoded view: the hash of the image's bytes, its crop, mirroring, colours."""
    changed = () if colours is None else (colours,)
    return image_sha256, (geometry.resized_hw, geometry.crop_top_left, geometry.target_hw, flip), *changed


class LatentCache:
    """Entries under ``root/<kind>/<first two characters of the key>/``; the kind is ``EntrySpec.name``.

    Attributes:
        written: kind -> (entries, bytes) written through this object.
        writing: the kind of entries being encoded.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: dict[str, tuple[int, int]] = {}
        self.writing = ""

    def fault(self, kind: str, key: str) -> str:
        """The fault of an entry without reading its payload: MISSING, a description of the damage, or "" if none.

        Reads the header and checks the file size against it; the payload is verified by ``get``.
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

    def holds(self, kind: str, key: str) -> bool:
        """Whether there is a file for an entry. Nothing is read, and the entry does not count as used."""
        return bool(self._names(kind, key))

    def num_bytes(self, kind: str, key: str, tensor: str) -> int:
        """Bytes of one tensor of an entry, from its header; the payload is not read.

        Raises:
            CacheEntryBad: there is no entry, or it is damaged.
        """
        path = self._path(kind, key, max(len(self._names(kind, key)) - 1, 0))
        try:
            begin, end = read_header(path).spans[tensor]
        except (OSError, KeyError) as error:
            raise CacheEntryBad(f"{path}: {error}") from error
        return end - begin

    def write_tensors(self, kind: str, key: str, tensors: Mapping[str, Tensor], item: str) -> None:
        """Serialise and write an entry: ``content_of``, then ``write``."""
        self.write(kind, key, self.content_of(kind, key, tensors, item))

    def content_of(self, kind: str, key: str, tensors: Mapping[str, Tensor], item: str) -> bytes:
        """Serialise an entry.

        Args:
            kind: name of the entry.
            key: from ``entry_key``.
            tensors: CPU tensors without a batch dimension.
            item: the image or caption, for the error message.

        Raises:
            DataError: "encoder-nonfinite", a tensor has values that are not finite.
        """
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise DataError(
                    "encoder-nonfinite",
                    f"The encoder returned values for {name} that are not finite.",
                    where=item,
                    fix="The encoder's weights are damaged (download the model again), or this machine computes "
                    "incorrectly (try runtime.device: cpu).",
                )
        stored = {name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}
        # The tensors are on the CPU, so int() waits for no device.
        fingerprints = {name: int(fingerprint(tensor[None])) for name, tensor in stored.items()}
        return save(stored, {METADATA_KEY: metadata_text(kind, key, fingerprints)})

    def write(self, kind: str, key: str, content: bytes) -> None:
        """Write an entry atomically; does nothing if another run has just written the same bytes.

        Raises:
            StorageError: the disk is full, or there is no permission.
        """
        names = self._names(kind, key)
        if not names or not _holds(names[-1], content):
            write_atomic(self._path(kind, key, len(names)), content, read_back=False)
            entries, written_bytes = self.written.get(kind, (0, 0))
            self.written[kind] = (entries + 1, written_bytes + len(content))

    def get(self, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
        """Read and fully verify an entry; returns the newest good one of several.

        Raises:
            CacheEntryBad: there is no intact entry that matches ``spec``.
        """
        reasons = []
        for path in reversed(self._names(kind, key)):
            try:
                return _checked(path, kind, key, spec)
            except (OSError, CacheEntryBad) as error:
                reasons.append(f"{path}: {error}")
        raise CacheEntryBad("; ".join(reasons) or f"{self._path(kind, key, 0)}: {MISSING}")

    def _path(self, kind: str, key: str, repair: int) -> Path:
        return self.root / kind / key[:2] / f"{key}{f'-{repair}' if repair else ''}.safetensors"

    def _names(self, kind: str, key: str) -> list[Path]:
        """The existing paths under the names of an entry, oldest first; a folder or a link occupies a name too."""
        names: list[Path] = []
        while os.path.lexists(path := self._path(kind, key, len(names))):
            names.append(path)
        return names


def _mark_used(path: Path) -> None:
    """Record the day on which an entry was used, if the cache is writable."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > MARK_AFTER_S:
            os.utime(path)


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file holds exactly these bytes."""
    try:
        return read_entry(path)[1] == content
    except (OSError, CacheEntryBad):
        return False


def _checked(path: Path, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
    """Read an entry from a file, and verify that its tensors are intact and match ``spec``.

    Raises:
        CacheEntryBad: the entry is damaged, of another kind or version, or has other tensors.
        OSError: the file cannot be read.
    """
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
            raise CacheEntryBad(f"the bytes of {name} have changed since they were written")
    return CachedItem(tensors, header.fingerprints)
