"""Reads and checks the files of cache entries without torch, for the cache and for its maintenance.

Files are untrusted. Their type, size and header are checked before the tensors are read. At most MAX_ENTRY_BYTES of a
file are in memory.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lora_rocm.foundation.safetensors_header import DamagedHeader, TensorEntry, parse_header

SPEC_VERSION = 1  # increase it if the same image or caption is encoded differently from before
METADATA_KEY = "lora_rocm"  # a single key: safetensors writes several in random order, but equal runs write equal bytes
MAX_ENTRY_BYTES = 1 << 29  # an image of 100 megapixels takes 50 MB
CHUNK_WORDS = 1 << 20
WORD_TYPES = {4: "<i4", 2: "<i2", 1: "u1"}


class CacheEntryBad(Exception):
    """A cache entry that is missing, damaged, or not of the expected kind. The message is the reason."""


@dataclass(frozen=True)
class EntryHeader:
    """The header of a cache entry.

    fingerprints: fingerprint of each tensor, by name.
    spans: (begin, end) of each tensor's bytes in the file, by name. There are no gaps between the spans.
    num_bytes: size of the file.
    """

    kind: str
    key: str
    spec_version: int
    fingerprints: dict[str, int]
    spans: dict[str, tuple[int, int]]
    num_bytes: int


def metadata_text(kind: str, key: str, fingerprints: Mapping[str, int]) -> str:
    """Return the metadata of a new entry as JSON. The entry's header contains it under METADATA_KEY."""
    facts = {"kind": kind, "key": key, "spec": SPEC_VERSION, "fingerprints": dict(fingerprints)}
    return json.dumps(facts, sort_keys=True)


def read_header(path: Path) -> EntryHeader:
    """Read the header of a cache entry's file.

    Raises:
        CacheEntryBad: the file is not a regular file, or its size does not match the header.
        OSError: the file cannot be read.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device might never end
        raise CacheEntryBad("it is not a regular file")
    if found.st_size > MAX_ENTRY_BYTES:
        raise CacheEntryBad("it is larger than a cache entry can be")
    try:
        with path.open("rb") as file:
            return _parsed(*parse_header(file, found.st_size), found.st_size)
    except DamagedHeader as error:
        raise CacheEntryBad(f"it is damaged: {error}") from error


def read_entry(path: Path) -> tuple[EntryHeader, bytes]:
    """Return the header and the whole content of an entry. The tensors' bytes are not verified.

    Raises:
        CacheEntryBad: the file is not a cache entry.
        OSError: the file cannot be read.
    """
    header = read_header(path)
    with path.open("rb") as file:
        content = file.read(header.num_bytes)
    if len(content) != header.num_bytes:
        raise CacheEntryBad("it became shorter while it was read")
    return header, content


def check_place(header: EntryHeader, kind: str, key: str) -> None:
    """Raise CacheEntryBad if an entry is not the one expected at its location in the cache.

    Args:
        header: the entry's header.
        kind: the kind of entry that the location requires.
        key: the cache key that the location requires.
    """
    if (header.kind, header.key) != (kind, key):
        raise CacheEntryBad("it is another entry's file")


def check_bytes(header: EntryHeader, content: bytes) -> None:
    """Raise CacheEntryBad if the bytes of a tensor do not match its fingerprint."""
    for name, (begin, end) in header.spans.items():
        if fingerprint_of(memoryview(content)[begin:end]) != header.fingerprints[name]:
            raise CacheEntryBad(f"the bytes of {name} have changed since they were written")


def fingerprint_of(sample: bytes | memoryview) -> int:
    """Return the same value as ``device.transfer.fingerprint`` for one sample's bytes, but computed without torch."""
    word_bytes = next(size for size in WORD_TYPES if len(sample) % size == 0)
    words_N = np.frombuffer(sample, dtype=WORD_TYPES[word_bytes])
    # Sum in chunks to bound memory; int64 wraps around, so the order of the sums does not matter.
    total = 0
    for first in range(0, words_N.size, CHUNK_WORDS):
        part_N = words_N[first : first + CHUNK_WORDS].astype(np.int64)
        total += int((part_N * _weights(first, part_N.size)).sum())
    return (total + 2**63) % 2**64 - 2**63


def _weights(first: int, count: int) -> NDArray[np.int64]:
    """Return the weights of ``count`` positions, starting at ``first``, as ``device.transfer`` computes them.

    All weights are odd. The int64 arithmetic wraps around. Shape [count].
    """
    mixed_N = np.arange(first + 1, first + count + 1, dtype=np.int64) * np.int64(-0x61C8864680B583EB)
    mixed_N = (mixed_N ^ (mixed_N >> 30)) * np.int64(-0x40A7B892E31B1A47)
    mixed_N = (mixed_N ^ (mixed_N >> 27)) * np.int64(-0x6B2FB644ECCEEE15)
    return (mixed_N ^ (mixed_N >> 31)) | np.int64(1)


def _parsed(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], num_bytes: int) -> EntryHeader:
    """Build an entry's header from the parsed header of a safetensors file.

    Raises:
        CacheEntryBad: the file is not a cache entry.
    """
    try:
        facts = json.loads(metadata[METADATA_KEY])  # json: the program's own file, rebuilt if it is damaged
        kind, key, spec_version = str(facts["kind"]), str(facts["key"]), int(facts.get("spec", 1))  # 0.1.0 wrote none
        fingerprints = {name: int(value) for name, value in facts["fingerprints"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CacheEntryBad("the header is damaged") from error
    if fingerprints.keys() != tensors.keys():
        raise CacheEntryBad("the header is damaged: its tensors and its fingerprints have different names")
    spans = {name: (entry.begin, entry.end) for name, entry in tensors.items()}
    return EntryHeader(kind, key, spec_version, fingerprints, spans, num_bytes)
