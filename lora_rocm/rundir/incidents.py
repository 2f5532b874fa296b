"""Failures, changes and restarts of a run, by time, from the event files of the supervisor and of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lora_rocm.rundir.events import read_events
from lora_rocm.rundir.layout import SUPERVISOR, RunDir

Event = dict[str, Any]

TYPES = ("failure", "change", "restart")


def trouble_of(run_dir: RunDir, events: Sequence[Event]) -> list[Event]:
    """``in_time`` for a run. ``events``: the events of rank 0, already read.

    Raises:
        StorageError: see ``events.read_events``.
    """
    others = [read_events(path, *TYPES) for path in run_dir.events_of_others()]
    return in_time(read_events(run_dir.events(SUPERVISOR)), [events, *others])


def in_time(supervisor: Iterable[Event], ranks: Iterable[Iterable[Event]]) -> list[Event]:
    """Failures, changes and restarts of the supervisor and of all ranks, in order of time.

    Ranks that train together run out of memory together, so a change that several of them made at one start is listed
    once.
    """
    found = [event for event in supervisor if event["type"] in TYPES]
    made = Counter[tuple[int, str]]()
    for events in ranks:
        here = Counter[tuple[int, str]]()
        for event in events:
            if event["type"] == "change":
                change = (event["session"], event["id"])
                here[change] += 1
                if here[change] > made[change]:
                    found.append(event)
            elif event["type"] in TYPES:
                found.append(event)
        made |= here
    return sorted(found, key=lambda event: float(event["time"]))


def last_word(events: Iterable[Event], trouble: Iterable[Event]) -> Event | None:
    """The last start's failure if the worker itself recorded no end (it hung or was killed), else None."""
    last = next((event for event in reversed(list(trouble)) if event["type"] == "failure"), None)
    for event in reversed(list(events)):
        if event["type"] in ("error", "end"):
            return None
        if event["type"] == "start":
            return last if last is not None and last["time"] >= event["time"] else None
    return last
