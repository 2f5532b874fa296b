"""Cache of encoder outputs, shared by all runs: content-addressed, atomically written and fingerprinted.

An entry is used only if its fingerprints match. Otherwise ``get`` raises CacheEntryBad, and its caller encodes the
entry again. Entries are read whole, not memory-mapped, because a mapped file cannot be repaired on Windows. A file is
never replaced: a repaired entry gets the next name (``key.safetensors``, ``key-1.safetensors``, ...), and ``get``
returns the newest intact one.
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
    """One cache entry.

    tensors: CPU tensors without a batch dimension, keyed by name.
    fingerprints: the tensors' fingerprints, computed when the entry was encoded.
    """

    tensors: dict[str, Tensor]
    fingerprints: dict[str, int]


def entry_key(entry: str, inputs: Sequence[Any], encoder_fingerprint: str) -> str:
    """Return the key of an entry: a hash of its name, its inputs and its encoder.

    ``inputs``: ``image_parts``, a caption, or both.
    """
    parts = [SPEC_VERSION, entry, *inputs, encoder_fingerprint]
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:40]


def image_parts(
    image_sha256: str, geometry: Geometry, flip: bool, colours: tuple[str, float] | None = None
) -> tuple[Any, ...]:
    """Return the key parts that identify one view of an image: hash of its bytes, crop, mirroring, colour change."""
    changed = () if colours is None else (colours,)
    return image_sha256, (geometry.resized_hw, geometry.crop_top_left, geometry.target_hw, flip), *changed


class LatentCache:
    """A cache folder's entries: files in ``root/<kind>/<first two characters of the key>/``.

    A kind is an ``EntrySpec.name``.

    Attributes:
        written: maps each kind to the (number, bytes) of entries written by this object.
        writing: kind of the entries that are being encoded now.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: dict[str, tuple[int, int]] = {}
        self.writing = ""

    def fault(self, kind: str, key: str) -> str:
        """Return MISSING, a description of an entry's damage, or "" if no fault is found.

        Only the header is read, and compared with the file's size. ``get`` also verifies the payload.
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
        """Return whether the cache has a file for an entry. The file is not read, and not marked as used."""
        return bool(self._names(kind, key))

    def num_bytes(self, kind: str, key: str, tensor: str) -> int:
        """Return the size of one tensor of an entry in bytes, from the file's header. The payload is not read.

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
        """Serialise an entry (``content_of``) and write it (``write``)."""
        self.write(kind, key, self.content_of(kind, key, tensors, item))

    def content_of(self, kind: str, key: str, tensors: Mapping[str, Tensor], item: str) -> bytes:
        """Serialise an entry. Return the content of its file.

        Args:
            kind: kind of the entry.
            key: key of the entry, from ``entry_key``.
            tensors: CPU tensors without a batch dimension, keyed by name.
            item: the image or caption, for the error message.

        Raises:
            DataError: "encoder-nonfinite", a tensor has values that are not finite.
        """
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise DataError(
                    "encoder-nonfinite",
                    f"The encoder's output {name} has values that are not finite.",
                    where=item,
                    fix="Download the model again, in case its weights are damaged. Or set runtime.device: cpu, in "
                    "case the GPU computes incorrectly.",
                )
        stored = {name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}
        # The tensors are on the CPU, so int() waits for no device.
        fingerprints = {name: int(fingerprint(tensor[None])) for name, tensor in stored.items()}
        return save(stored, {METADATA_KEY: metadata_text(kind, key, fingerprints)})

    def write(self, kind: str, key: str, content: bytes) -> None:
        """Write an entry atomically. Does nothing if the newest file of the entry already has this content.

        Raises:
            StorageError: the disk is full, or there is no permission.
        """
        names = self._names(kind, key)
        if not names or not _holds(names[-1], content):
            write_atomic(self._path(kind, key, len(names)), content, read_back=False)
            entries, written_bytes = self.written.get(kind, (0, 0))
            self.written[kind] = (entries + 1, written_bytes + len(content))

    def get(self, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
        """Read and fully verify an entry. If it has several files, return the newest intact one.

        Raises:
            CacheEntryBad: no file is intact and matches ``spec``.
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
        """Return the existing files of an entry, oldest first.

        A folder or broken link with an entry's name is included, because this name cannot be used for a new file.
        """
        names: list[Path] = []
        while os.path.lexists(path := self._path(kind, key, len(names))):
            names.append(path)
        return names


def _mark_used(path: Path) -> None:
    """Set a file's mtime, the time of its last use, to now if it is older than a day and the cache is writable."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > MARK_AFTER_S:
            os.utime(path)  # writes: the time of an entry of the cache, for cache prune


def _holds(path: Path, content: bytes) -> bool:
    """Return whether an entry's file has exactly this content."""
    try:
        return read_entry(path)[1] == content
    except (OSError, CacheEntryBad):
        return False


def _checked(path: Path, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
    """Read an entry from one file, and verify that its tensors are intact and match ``spec``.

    Raises:
        CacheEntryBad: the entry is damaged, of another kind or version, or has other tensors.
        OSError: the file cannot be read.
    """
    header, content = read_entry(path)
    check_place(header, kind, key)
    if header.spec_version != SPEC_VERSION:
        raise CacheEntryBad(f"its format version is {header.spec_version}, not {SPEC_VERSION}")
    if header.spans.keys() != set(spec):
        raise CacheEntryBad(f"it contains the tensors {sorted(header.spans)}, not {sorted(spec)}")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise CacheEntryBad(f"it cannot be read ({error})") from error
    for name, tensor in tensors.items():
        if tensor.dtype != getattr(torch, spec[name].dtype) or tensor.ndim != len(spec[name].dims):
            raise CacheEntryBad(f"{name} has the wrong type: {tensor.dtype} with {tensor.ndim} dimensions")
        if int(fingerprint(tensor[None])) != header.fingerprints[name]:
            raise CacheEntryBad(f"the bytes of {name} have changed since they were written")
    return CachedItem(tensors, header.fingerprints)
