"""The records of what past runs on this machine made necessary. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """The size of a run, as far as it decides about memory. ``id``: short and stable; ``text``: for people."""

    id: str
    text: str


@dataclass(frozen=True)
class Kept:
    """One change: because of what (``changes.Seen``), since which day (ISO), and for which runs (None: all)."""

    change: str
    seen: str
    when: str
    workload: Workload | None = None


@dataclass(frozen=True)
class Remembered:
    """What the file of this stack says. ``damaged``: there is one that cannot be read; it counts as empty."""

    entries: tuple[Kept, ...] = ()
    damaged: bool = False
