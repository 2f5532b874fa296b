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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lora_rocm.cache_files.entry_file import (
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
    from lora_rocm.dataset.buckets import Geometry
    from lora_rocm.dataset.entry_spec import TensorSpec

MARK_AFTER_S = (
    24 * 3600
)  # the time of change of a file says, to the day, when a run last wanted it: for ``cache prune``
MISSING = "missing"


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
