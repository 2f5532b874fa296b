"""Reads one line of an event file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from pydantic import TypeAdapter
from pydantic_core import from_json

from lora_rocm.foundation.terminal_text import legible
from lora_rocm.rundir.event_types import TYPES, Event, StepEvent

MAX_NAMES, OTHERS = 100, "..."
BEGIN = re.compile(rb'\{"type": ?"([a-z]+)"(?:, ?|(?=\}))')
"""Matches the beginning of a line, as this version writes it."""


@dataclass
class SkippedLines:
    """Counts of lines and fields that were skipped in an event file.

    Attributes:
        lines: number of lines that are not events: torn, printed by a library, or with values of wrong types.
        kinds: number of lines of each type of event that this version does not know.
        fields: number of lines with an unknown field ("step.depth"), by field; the rest of such a line is read.
    """

    lines: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)


STEP_BEGIN = b'{"type": "step", '
"""The beginning of a step's line, as this version writes it."""


def steps_of(lines: Sequence[bytes]) -> list[StepEvent] | None:
    """Return the steps of lines that begin with ``STEP_BEGIN``, one per line. Faster than ``event_of`` for each line.

    It returns None if any of the lines is not a step as this version writes it.
    """
    # The lines become one JSON array. A torn line cannot merge with the next one: a line break is not allowed in a
    # JSON string, and a step contains no lists. Several steps on one line increase the number of steps.
    try:
        steps = _steps().validate_json(b"[{" + b",\n{".join(line[len(STEP_BEGIN) :] for line in lines) + b"]")
    except ValueError:
        return None
    return steps if len(steps) == len(lines) else None


@cache
def _steps() -> TypeAdapter[list[StepEvent]]:
    return TypeAdapter(list[StepEvent])


def _count(counter: Counter[str], name: str) -> None:
    """Count a name that was read from a file. Beyond MAX_NAMES names, further ones are counted together."""
    name = legible(name)[:MAX_NAMES]
    counter[name if name in counter or len(counter) < MAX_NAMES else OTHERS] += 1


def event_of(line: bytes, skipped: SkippedLines | None = None) -> Event | None:
    """Return the event on a line, or None if it is not an event or has a type of another version.

    ``skipped``: where skipped lines and fields are counted.
    """
    begin = BEGIN.match(line)
    kind = TYPES.get(begin[1].decode("ascii")) if begin else None
    if kind is not None and begin is not None:
        try:  # as this version writes it: without a check of each field
            return kind.model_validate_json(b"{" + line[begin.end() :])
        except ValueError:
            pass
    skipped = SkippedLines() if skipped is None else skipped
    try:  # a line may be torn by a crash, printed by a library, or nested without end
        found = from_json(line)
        name = found.pop("type", None) if isinstance(found, dict) else None
        kind = TYPES.get(name) if isinstance(name, str) else None
        if kind is None and isinstance(name, str):
            _count(skipped.kinds, name)
            return None
        read = None if kind is None else kind.read(found)
    except ValueError:
        read = None
    if read is None:
        skipped.lines += 1
    elif read.model_config["extra"] != "allow":
        for each in found.keys() - type(read).model_fields.keys():
            _count(skipped.fields, f"{read.type}.{each}")
    return read
