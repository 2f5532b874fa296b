"""What the encoders made, kept between runs: content-addressed, atomic, fingerprinted.

An entry is trusted only as far as its fingerprints go: whatever does not match is CacheEntryBad, and is encoded again
by whoever asked. Entries are read whole, not mapped (a mapped file cannot be repaired on Windows), and never replaced:
a repaired entry gets the next name (``key.safetensors``, ``key-1.safetensors``, ...) and the last good one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lora_rocm.device.transfer import fingerprint
from lora_rocm.errors import DataError, storage_error
from lora_rocm.run.layout import write_atomic

if TYPE_CHECKING:
    from lora_rocm.data.buckets import Geometry
    from lora_rocm.families.base import TensorSpec

SPEC_VERSION = 1  # raise it when the same picture or caption would be encoded otherwise
METADATA_KEY = "lora_rocm"  # one key: safetensors writes several in random order, and equal runs write equal bytes
MAX_HEADER_BYTES = 1 << 20
SETTLED_S = 2.0  # a file changed this recently could change again within one tick of its time stamp


class CacheEntryBad(Exception):
    """An entry that is missing, damaged or of another kind; the message says which."""


@dataclass(frozen=True)
class CachedItem:
    """One entry: CPU tensors without a batch dimension, and the fingerprint of each, computed when it was encoded."""

    tensors: dict[str, Tensor]
    fingerprints: dict[str, int]


def image_key(image_sha256: str, geometry: Geometry, flip: bool, encoder_fingerprint: str) -> str:
    """Key of an encoded picture: its bytes, how it is cut, and what encodes it."""
    cut = (geometry.resized_hw, geometry.crop_top_left, geometry.target_hw, flip)
    return _key("image", image_sha256, cut, encoder_fingerprint)


def text_key(caption: str, encoder_fingerprint: str) -> str:
    """Key of an encoded caption."""
    return _key("text", caption, encoder_fingerprint)


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([SPEC_VERSION, *parts]).encode("ascii")).hexdigest()[:40]


class LatentCache:
    """Entries under ``root/<kind>/<first two of the key>/``; kinds are "image" and "text"."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, kind: str, key: str) -> bool:
        """Whether there is an entry whose size is that which its header says; its bytes are checked by ``get``."""
        names = self._names(kind, key)
        return bool(names) and _has_stated_size(names[-1])

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], item: str) -> None:
        """Write an entry, whole or not at all.

        Args:
            kind: "image" or "text".
            key: from ``image_key`` or ``text_key``.
            tensors: CPU tensors without a batch dimension.
            item: the picture or caption, for the error.

        Raises:
            DataError: "encoder-nonfinite".
            StorageError: disk full, no permission.
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
        metadata = json.dumps({"kind": kind, "key": key, "fingerprints": fingerprints}, sort_keys=True)
        path = self._path(kind, key, len(self._names(kind, key)))
        write_atomic(path, save(stored, {METADATA_KEY: metadata}))

    def get(self, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
        """Read an entry and check everything about it; of several the newest good one.

        Raises:
            CacheEntryBad: there is no entry that is as it was written and as ``spec`` wants it.
        """
        reasons = []
        for path in reversed(self._names(kind, key)):
            try:
                return _checked(path.read_bytes(), kind, key, spec)
            except OSError as error:
                reasons.append(f"{path}: {error}")
            except CacheEntryBad as error:
                reasons.append(f"{path}: {error}")
        raise CacheEntryBad("; ".join(reasons) or f"{self._path(kind, key, 0)}: missing")

    def _path(self, kind: str, key: str, repair: int) -> Path:
        return self.root / kind / key[:2] / f"{key}{f'-{repair}' if repair else ''}.safetensors"

    def _names(self, kind: str, key: str) -> list[Path]:
        """The existing files of an entry, oldest first."""
        names: list[Path] = []
        while (path := self._path(kind, key, len(names))).is_file():
            names.append(path)
        return names


def _split_header(content: bytes) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and where the data begins.

    Raises:
        CacheEntryBad: there is none.
    """
    num_bytes = int.from_bytes(content[:8], "little")
    if len(content) < 8 or num_bytes > MAX_HEADER_BYTES:
        raise CacheEntryBad("the header is damaged")
    try:
        header = json.loads(content[8 : 8 + num_bytes])
    except ValueError as error:
        raise CacheEntryBad("the header is damaged") from error
    if not isinstance(header, dict):
        raise CacheEntryBad("the header is damaged")
    return header, 8 + num_bytes


def _has_stated_size(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            header, data_at = _split_header(start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return path.stat().st_size == data_at + max(ends, default=0)
    except (OSError, CacheEntryBad, LookupError, TypeError):
        return False


def _checked(content: bytes, kind: str, key: str, spec: Mapping[str, TensorSpec]) -> CachedItem:
    """The entry in ``content``, if every tensor is the one that was written and the one that is wanted."""
    header, _ = _split_header(content)
    try:
        metadata = json.loads(header["__metadata__"][METADATA_KEY])
        named, fingerprints = (metadata["kind"], metadata["key"]), metadata["fingerprints"]
        tensors = load(content)
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CacheEntryBad(f"it cannot be read ({error})") from error
    if named != (kind, key):
        raise CacheEntryBad("it is another entry's file")
    if set(tensors) != set(spec) or set(fingerprints) != set(spec):
        raise CacheEntryBad(f"it holds {sorted(tensors)}, not {sorted(spec)}")
    for name, tensor in tensors.items():
        if tensor.dtype != getattr(torch, spec[name].dtype) or tensor.ndim != len(spec[name].dims):
            raise CacheEntryBad(f"{name} is {tensor.dtype} of {tensor.ndim} dimensions")
        if int(fingerprint(tensor[None])) != fingerprints[name]:
            raise CacheEntryBad(f"{name} is not as it was written")
    return CachedItem(tensors, fingerprints)


class HashMemory:
    """SHA-256 of files, remembered by (absolute path, size, time of change) in ``hashes.jsonl``, which only grows.

    The file is read when it is first asked; a line torn by a crash is skipped.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / "hashes.jsonl"
        self._known: dict[bytes, str] | None = None

    def sha256(self, file: Path) -> str:
        """The hash of a file's bytes, read only if the file is new or changed.

        Raises:
            OSError: the file cannot be read.
            StorageError: the memory cannot be written.
        """
        stat = file.stat()
        identity = [str(file.absolute()), stat.st_size, stat.st_mtime_ns]
        if self._known is None:
            self._known = self._read()
        known = self._known.get(_digest(identity))
        if known is not None:
            return known
        with file.open("rb") as opened:
            computed = hashlib.file_digest(opened, "sha256").hexdigest()
        if time.time() - stat.st_mtime > SETTLED_S:
            self._known[_digest(identity)] = computed
            self._append([*identity, computed])
        return computed

    def _read(self) -> dict[bytes, str]:
        known = {}
        try:
            with self.path.open("rb") as file:
                for line in file:
                    try:
                        path, size, mtime_ns, sha256 = json.loads(line)
                    except (ValueError, TypeError):
                        continue
                    known[_digest([path, size, mtime_ns])] = sha256
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(error, self.path) from error
        return known

    def _append(self, line: list[Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # torn by a crash
                        file.write(b"\n")
                file.write(json.dumps(line).encode("ascii") + b"\n")
        except OSError as error:
            raise storage_error(error, self.path) from error


def _digest(identity: list[Any]) -> bytes:
    """A short name for a file's state: a million of them take little memory."""
    return hashlib.blake2b(json.dumps(identity).encode("ascii"), digest_size=16).digest()
