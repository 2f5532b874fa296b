"""The record of a checkpoint folder, and checks that its files are unchanged.

Resume, export and ``status`` all read it with this code, so they agree on which checkpoints are intact.

A checkpoint may come from somebody else: the seal is a plain checksum, which detects damage but not forgery. So the
content of ``state.json`` determines neither which files are read nor how much memory they take.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rocm.errors import StorageError
from lora_rocm.foundation.bounded_read import check_plain, read_plain
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.model_files.header import read_header
from lora_rocm.rundir.layout import CHECKPOINT_NAME, FILE_OF, STATE_FILE

MAX_STATE_BYTES = 1 << 30  # it contains the captions' tags: 40,000 per folder, each of any length
MAX_PART_BYTES = 1 << 36  # the moments of rank 1024 on all attention and MLPs of SDXL take 20 GiB
PIECE_BYTES = 1 << 20  # read at once while checksumming
MAX_COUNT = 2**63


@dataclass
class Position:
    """The position of a run. Nothing else determines the next step, and all of it is saved in checkpoints."""

    iteration: int = 0  # updates tried, made or skipped: decides data and noise
    updates: int = 0  # updates made: decides the schedule and the end
    attempt: int = 0  # increased by each roll-back, to draw other noise
    nonfinite_in_a_row: int = 0


@dataclass(frozen=True)
class CheckpointRecord:
    """The content of ``state.json`` in a checkpoint folder. The headers of the folder's files have been checked.

    checksums: SHA-256 by file name.
    """

    path: Path
    position: Position
    facts: dict[str, Any]
    checksums: dict[str, str]

    @property
    def digest(self) -> str:
        """A short digest of all files, for comparing checkpoints."""
        content = json.dumps(self.checksums, sort_keys=True)
        return hashlib.sha256(content.encode("utf-8")).hexdigest()[:16]


def read_record(folder: Path) -> CheckpointRecord:
    """Read ``state.json`` and the headers of the files that it lists. Checksums are not compared.

    Raises:
        StorageError: "checkpoint-damaged", a file is damaged, missing or not in the expected format; ``where`` is the
            file.
        ModelError: a header is damaged.
    """
    state_file = folder / STATE_FILE
    try:
        state = parse_json(content_of(state_file, MAX_STATE_BYTES))
        if sealed({key: value for key, value in state.items() if key != "seal"}) != _as_json(state):
            raise ValueError("the seal differs")
        position, facts, checksums = Position(**state["position"]), state["facts"], state["sha256"]
        counts = [position.iteration, position.updates, position.attempt, position.nonfinite_in_a_row]
        if not all(type(count) is int and 0 <= count < MAX_COUNT for count in counts):
            raise ValueError("a number of the position is not a valid count")
        if not isinstance(facts, dict) or not set(checksums) <= set(FILE_OF.values()):  # else it could name any file
            raise ValueError("the record names a file that no checkpoint has")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise damaged(state_file, "This file is missing or damaged.") from error
    named = CHECKPOINT_NAME.match(folder.name)
    if named and int(named.group(1)) != position.updates:
        what = f"This file belongs to step {position.updates}, not to this folder: one of the two was moved."
        raise damaged(state_file, what)
    for name in sorted(checksums):
        read_header(folder / name)  # the checksum may match a file that is not safetensors
    return CheckpointRecord(folder, position, facts, dict(checksums))


def damaged(file: Path, what: str) -> StorageError:
    """Return the error for a damaged file of a checkpoint."""
    fix = "Check the disk. A resume skips damaged checkpoints."
    return StorageError("checkpoint-damaged", what, where=str(file), fix=fix)


def compare_checksum(record: CheckpointRecord, name: str, found: str) -> None:
    """Compare the SHA-256 ``found`` in a checkpoint's file with the recorded one.

    Raises:
        StorageError: "checkpoint-damaged", they differ.
    """
    if found != record.checksums[name]:
        raise damaged(record.path / name, "This file changed after it was written: its checksum differs.")


def checksum_of(path: Path) -> str:
    """SHA-256 of a regular file. Bytes that are appended during the read are not included.

    Raises:
        OSError: the file is missing, not regular, too large, or cannot be read.
    """
    left, found = check_plain(path, MAX_PART_BYTES), hashlib.sha256()
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            found.update(piece)
            left -= len(piece)
    return found.hexdigest()


def content_of(path: Path, max_bytes: int) -> bytes:
    """Read a file with ``read_plain``, with the file's current size as the limit.

    A larger limit would waste memory, because ``read_plain`` allocates as many bytes as its limit.

    Raises:
        OSError: see ``read_plain``.
    """
    return read_plain(path, check_plain(path, max_bytes))


def sealed(state: Mapping[str, Any]) -> bytes:
    """The content of ``state.json`` as bytes: the state and its checksum (the seal)."""
    return _as_json({**state, "seal": hashlib.sha256(_as_json(state)).hexdigest()})


def _as_json(state: Mapping[str, Any]) -> bytes:
    return json.dumps(state, indent=1, sort_keys=True).encode("utf-8")
