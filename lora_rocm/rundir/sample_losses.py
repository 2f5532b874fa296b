"""The loss of each sample at each step, in one binary file per rank (``losses.rankN.bin``).

The file is a header and one block per update. A block has a checksum, so that a torn or damaged tail is detected. Names
of samples are written once, when they first occur. The file may come from somebody else.

Layout, little-endian::

    header  16 bytes, ``HEADER``
    block   uint32 payload bytes, uint32 CRC-32 of updates and payload, uint64 updates, payload
    payload uint16 new names, for each uint16 bytes and UTF-8; then 10 bytes per sample:
            uint32 number of the name, uint16 position in the noise schedule (65535: noise), float32 loss
"""

from __future__ import annotations

import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import is_link, open_in_place

HEADER = b"LORAROCM-LOSS-1\n"
BLOCK = struct.Struct("<IIQ")
COUNT, UPDATES = struct.Struct("<H"), struct.Struct("<Q")
RECORD = np.dtype([("sample", "<u4"), ("position", "<u2"), ("loss", "<f4")])
MAX_BYTES = 1 << 28
"""The file never grows beyond this: a million updates of 25 samples."""
MAX_BLOCK_BYTES = 1 << 22
MAX_NAME_BYTES = 1 << 12
MAX_NEW_NAMES = (1 << 16) - 1
SCALE = 65535


@dataclass(frozen=True)
class SampleLosses:
    """The recorded losses, in the order of training; all arrays have one element per visit of a sample.

    names: names of the samples. sample: index in ``names``. position: in the noise schedule, 0 image to 1 noise.
    ends: for each file with bytes that are not an intact block, the last step before them.
    """

    names: tuple[str, ...]
    updates: NDArray[np.int64]
    sample: NDArray[np.int64]
    position: NDArray[np.float64]
    loss: NDArray[np.float64]
    ends: Mapping[Path, int] = field(default_factory=dict)

    def lost_after(self, updates: int) -> list[str]:
        """Return sentences about files in which steps up to ``updates`` are damaged.

        A torn end of the newest step is normal, and is not mentioned.
        """
        return [
            f"The losses of single images after step {end} cannot be read, because {path.name} is damaged there."
            for path, end in self.ends.items()
            if end < updates
        ]


@dataclass
class LossWriter:
    """Appends to the file of one rank. A failure to write never ends a run.

    Attributes:
        path: the file.
        keep: number of updates that are kept. Later ones are cut off, because they are trained again.
        notice: receives a sentence if recorded steps were damaged, or if writing fails; nothing is recorded then.
        max_bytes: size at which the recording ends.
    """

    path: Path
    keep: int
    notice: Callable[[str], None]
    max_bytes: int = MAX_BYTES
    _numbers: dict[str, int] = field(default_factory=dict, init=False)
    _file: IO[bytes] | None = field(default=None, init=False)
    _size: int = field(default=0, init=False)
    _num_names: int = field(default=0, init=False)

    def begin(self) -> None:
        """Cut off repeated updates and everything from a damaged block on, and open the file for appending.

        The notice names the steps that are lost. A torn tail of a repeated step is normal, and is not mentioned.

        A file that another version of lora-rocm wrote is left unchanged, and nothing is recorded.

        Raises:
            StorageError: there is a link or a folder in place of the file.
        """
        if _is_of_another_kind(self.path):
            self.notice(
                "The losses of single images are not recorded, because another version of lora-rocm wrote the file, or "
                f"it is damaged: {self.path}. Remove it to record again."
            )
            return
        file = open_in_place(self.path, buffering=0)
        try:
            blocks = _blocks(self.path)
            kept = bisect_right(blocks.updates, self.keep)
            end, num_names = (blocks.ends[kept - 1], blocks.num_names[kept - 1]) if kept else (0, 0)
            if blocks.has_rest and blocks.last_updates < self.keep:
                self.notice(
                    f"The losses of single images from step {blocks.last_updates + 1} to {self.keep} are lost: "
                    f"{self.path} is damaged at byte {max(end, len(HEADER))}, and was cut off there. "
                    "Recording continues; the training is not affected."
                )
            self._numbers = {name: number for number, name in enumerate(blocks.names[:num_names])}
            file.truncate(end)  # writes: its own open file
            if not end:
                file.write(HEADER)
            self._file, self._size, self._num_names = file, max(end, len(HEADER)), num_names
        except OSError as error:
            file.close()
            self._give_up(error)

    def record(self, updates: int, names: Sequence[str], positions: Sequence[float], losses: Sequence[float]) -> None:
        """Append the samples of one update. Rows without a position (NaN) or a finite loss are skipped."""
        if self._file is None:
            return
        rows: list[tuple[int, int, float]] = []
        new: list[str] = []
        for name, position, loss in zip(names, positions, losses, strict=True):
            if not (math.isfinite(position) and math.isfinite(loss)):
                continue
            if name not in self._numbers and len(new) < MAX_NEW_NAMES:
                self._numbers[name] = self._num_names + len(new)
                new.append(name)
            if name in self._numbers:
                rows.append((self._numbers[name], round(min(max(position, 0.0), 1.0) * SCALE), loss))
        if not rows:
            return
        self._num_names += len(new)
        encoded = [name.encode("utf-8", "surrogatepass")[:MAX_NAME_BYTES] for name in new]
        texts = b"".join(COUNT.pack(len(text)) + text for text in encoded)
        payload = COUNT.pack(len(new)) + texts + np.array(rows, RECORD).tobytes()
        block = BLOCK.pack(len(payload), _checksum(updates, payload), updates) + payload
        if self._size + len(block) > self.max_bytes or len(payload) > MAX_BLOCK_BYTES:
            self.notice("The losses of single images are no longer recorded: their file has reached its largest size.")
            self.close()
            return
        try:
            self._file.write(block)
            self._size += len(block)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Nothing is recorded afterwards."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _give_up(self, error: OSError) -> None:
        self.notice(
            f"The losses of single images are no longer recorded: {error.strerror or error} ({self.path}). "
            "Training continues."
        )
        self.close()


def read_losses(paths: Sequence[Path]) -> SampleLosses:
    """Return the losses in the files of all ranks. Missing files are skipped, and all blocks after a damaged one."""
    numbers: dict[str, int] = {}
    rows, samples, updates = [np.empty(0, RECORD)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    ends = dict[Path, int]()
    for path in paths:
        blocks = _blocks(path)
        own = np.array([numbers.setdefault(name, len(numbers)) for name in blocks.names], np.int64)
        ends |= {path: blocks.last_updates} if blocks.has_rest else {}
        rows.append(blocks.records)
        samples.append(own[blocks.records["sample"]])
        updates.append(np.repeat(np.array(blocks.updates, np.int64), blocks.num_rows))
    found, sample = np.concatenate(rows), np.concatenate(samples)
    position, loss = found["position"] / SCALE, found["loss"].astype(np.float64)
    return SampleLosses(tuple(numbers), np.concatenate(updates), sample, position, loss, ends)


@dataclass
class _Blocks:
    """The intact blocks of a file, up to the first damaged one.

    updates, num_rows, num_names, ends: for each block its updates, rows, all names so far, and the offset of its end.
    has_rest: whether there are bytes after them.
    """

    updates: list[int] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    num_names: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    records: NDArray[np.void] = field(default_factory=lambda: np.empty(0, RECORD))
    has_rest: bool = False

    @property
    def last_updates(self) -> int:
        return self.updates[-1] if self.updates else 0


def _is_of_another_kind(path: Path) -> bool:
    """Whether a file begins neither with HEADER nor with a part of HEADER, which a kill may leave."""
    try:
        if is_link(path) or not path.is_file():  # there is none, or ``begin`` refuses it
            return False
        with path.open("rb") as file:
            begin = file.read(len(HEADER))
    except OSError:
        return False
    return not HEADER.startswith(begin)


def _blocks(path: Path) -> _Blocks:
    """Read the blocks of a file; empty if it is missing, not a regular file, or of another kind."""
    found, pieces = _Blocks(), list[memoryview]()
    try:
        content = memoryview(read_plain(path, MAX_BYTES) if not is_link(path) else b"")
    except OSError:
        return found
    at = len(HEADER)
    if content[:at] != HEADER:
        return found
    # The blocks, by their checksums
    while at + BLOCK.size <= len(content):
        size, checksum, updates = BLOCK.unpack_from(content, at)
        begin, end = at + BLOCK.size, at + BLOCK.size + size
        is_whole = size <= MAX_BLOCK_BYTES and end <= len(content) and updates < 2**63
        if not is_whole or zlib.crc32(content[begin - UPDATES.size : end]) != checksum:
            break
        first = _read_names(content[begin:end], found.names)
        if first is None:
            break
        pieces.append(content[begin + first : end])
        found.updates.append(updates)
        found.num_rows.append((size - first) // RECORD.itemsize)
        found.num_names.append(len(found.names))
        found.ends.append(end)
        at = end
    # Their rows; a row with an unknown name makes its block a damaged one
    found.records = np.frombuffer(b"".join(pieces), RECORD)
    unknown = found.records["sample"] >= np.repeat(np.array(found.num_names, np.int64), found.num_rows)
    if unknown.any():
        bad = int(np.searchsorted(np.cumsum(found.num_rows), int(unknown.argmax()), side="right"))
        found.records = found.records[: sum(found.num_rows[:bad])]
        del found.names[found.num_names[bad - 1] if bad else 0 :]
        for each in (found.updates, found.num_rows, found.num_names, found.ends):
            del each[bad:]
    found.has_rest = (found.ends[-1] if found.ends else len(HEADER)) < len(content)
    return found


def _read_names(payload: memoryview, names: list[str]) -> int | None:
    """Append the new names of a payload, and return the offset of its records; None if it has another layout."""
    if len(payload) < COUNT.size:
        return None
    (count,), at = COUNT.unpack_from(payload), COUNT.size
    new = []
    for _ in range(count):
        if at + COUNT.size > len(payload):
            return None
        (length,) = COUNT.unpack_from(payload, at)
        at += COUNT.size
        new.append(str(payload[at : at + length], "utf-8", "replace"))
        at += length
    if at > len(payload) or (len(payload) - at) % RECORD.itemsize:
        return None
    names += new
    return at


def _checksum(updates: int, payload: bytes) -> int:
    return zlib.crc32(UPDATES.pack(updates) + payload)
