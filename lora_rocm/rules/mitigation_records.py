"""Records of the mitigations that past runs on this machine needed. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """The properties of a run that decide its memory use. ``id``: short and stable; ``text``: for people."""

    id: str
    text: str


@dataclass(frozen=True)
class Kept:
    """A stored mitigation.

    change: its id.
    seen: the failure that it answers (``mitigations.Seen``).
    when: day of the failure (ISO).
    workload: the runs that it is for; None: all.
    """

    change: str
    seen: str
    when: str
    workload: Workload | None = None


@dataclass(frozen=True)
class Remembered:
    """The stored mitigations of a software stack. ``damaged``: the file cannot be read and counts as empty."""

    entries: tuple[Kept, ...] = ()
    damaged: bool = False
