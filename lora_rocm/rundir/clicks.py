"""The votes of a blind test, in a file of the run that is only appended to (``RunDir.clicks``).

Each vote is one line of JSON. A line that cannot be read is ignored, such as the last one after a power failure.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lora_rocm.errors import storage_error
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import open_in_place
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.rundir.layout import RunDir

Preferred = Literal["first", "second", "tie"]
PREFERRED: tuple[Preferred, ...] = get_args(Preferred)
MAX_CLICKS_BYTES = 1 << 26


@dataclass(frozen=True)
class Side:
    """One of two pictures. updates: the step of its LoRA file. picture: path relative to the run."""

    updates: int
    strength: float
    picture: str


@dataclass(frozen=True)
class Click:
    """A vote.

    Attributes:
        prompt: the prompt of both pictures.
        first, second: the two compared variants.
        preferred: the better one.
        time: when, in seconds since the epoch.
        automatic: whether it is a tie of two equal results, which was counted without asking the user.
    """

    prompt: str
    first: Side
    second: Side
    preferred: Preferred
    time: float
    automatic: bool = False


def add_click(run_dir: RunDir, click: Click) -> None:
    """Append a vote.

    Raises:
        StorageError: it cannot be written.
    """
    _append(run_dir, asdict(click))


def undo_click(run_dir: RunDir) -> None:
    """Append that the newest vote of the user, and the automatic ones after it, do not count.

    Without votes nothing is written.

    Raises:
        StorageError: it cannot be written.
    """
    if read_clicks(run_dir):
        _append(run_dir, {"time": time.time(), "undo": True})


def read_clicks(run_dir: RunDir) -> Sequence[Click]:
    """Return the votes that count, oldest first.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        content = read_plain(run_dir.clicks, MAX_CLICKS_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(error, run_dir.clicks) from error
    found = list[Click]()
    for line in content.splitlines():
        value = _parsed(line)
        if value.get("undo") is True:
            while found and found.pop().automatic:
                pass
        elif (click := _click(value)) is not None:
            found.append(click)
    return found


def _append(run_dir: RunDir, value: dict[str, Any]) -> None:
    with open_in_place(run_dir.clicks, buffering=0) as file:
        try:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            is_torn = end > 0 and file.read(1) != b"\n"  # a write that a power failure cut short
            line = json.dumps(value, sort_keys=True).encode("ascii") + b"\n"
            file.write(b"\n" + line if is_torn else line)
            os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(error, run_dir.clicks) from error


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _click(value: dict[str, Any]) -> Click | None:
    """Return the vote of a line, or None if it is not one."""
    prompt, when = value.get("prompt"), _number(value.get("time"))
    preferred = next((each for each in PREFERRED if each == value.get("preferred")), None)
    first, second = _side(value.get("first")), _side(value.get("second"))
    if not isinstance(prompt, str) or preferred is None or when is None or first is None or second is None:
        return None
    return Click(prompt, first, second, preferred, when, value.get("automatic") is True)


def _side(value: Any) -> Side | None:
    if not isinstance(value, dict):
        return None
    updates, strength, picture = value.get("updates"), _number(value.get("strength")), value.get("picture")
    if type(updates) is not int or strength is None or not isinstance(picture, str):
        return None
    return Side(updates, strength, picture)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
