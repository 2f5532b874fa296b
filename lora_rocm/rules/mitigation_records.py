"""Records of the mitigations that past runs on this machine needed. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """The properties of a run that determine its memory use.

    id: short, stable identifier.
    text: description for the user.
    """

    id: str
    text: str


@dataclass(frozen=True)
class Kept:
    """A stored mitigation.

    change: id of the mitigation.
    seen: kind of failure that made it necessary (``mitigations.Seen``).
    when: day of the failure, in ISO format.
    workload: runs for which it is stored, or None for all runs.
    """

    change: str
    seen: str
    when: str
    workload: Workload | None = None


@dataclass(frozen=True)
class Remembered:
    """The stored mitigations of a software stack.

    damaged: whether the file cannot be read. If so, there are no entries.
    """

    entries: tuple[Kept, ...] = ()
    damaged: bool = False
