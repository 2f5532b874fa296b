"""Failures, changes and restarts of a run in order of time, from the event files of the supervisor and of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lora_rocm.rundir import event_types
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.layout import SUPERVISOR, RunDir

Trouble = event_types.FailureEvent | event_types.ChangeEvent | event_types.RestartEvent
KINDS = (event_types.FailureEvent, event_types.ChangeEvent, event_types.RestartEvent)


def trouble_of(run_dir: RunDir, events: Iterable[event_types.Event]) -> list[Trouble]:
    """Return the failures, changes and restarts of a run, as ``in_time`` does.

    ``events``: rank 0's events, already read.

    Raises:
        StorageError: see ``events.read_events``.
    """
    supervisor, *others = (
        EventReader(path, kinds=KINDS).poll() for path in (run_dir.events(SUPERVISOR), *run_dir.events_of_others())
    )
    return in_time(supervisor, [events, *others])


def in_time(supervisor: Iterable[event_types.Event], ranks: Iterable[Iterable[event_types.Event]]) -> list[Trouble]:
    """Return the failures, changes and restarts of the supervisor and of all ranks, in order of time.

    Ranks that train together run out of memory together. So if several ranks make the same change in one start, it is
    listed once.
    """
    found = [event for event in supervisor if isinstance(event, KINDS)]
    made = Counter[tuple[int, str]]()
    for events in ranks:
        here = Counter[tuple[int, str]]()
        for event in events:
            match event:
                case event_types.ChangeEvent():
                    change = (event.session, event.id)
                    here[change] += 1
                    if here[change] > made[change]:
                        found.append(event)
                case event_types.FailureEvent() | event_types.RestartEvent():
                    found.append(event)
        made |= here
    return sorted(found, key=lambda event: event.time)


def last_word(events: Sequence[event_types.Event], trouble: Sequence[Trouble]) -> event_types.FailureEvent | None:
    """The last start's failure if the worker itself reported no end (it hung or was killed), otherwise None."""
    last = next((event for event in reversed(trouble) if isinstance(event, event_types.FailureEvent)), None)
    for event in reversed(events):
        match event:
            case event_types.ErrorEvent() | event_types.EndEvent():
                return None
            case event_types.StartEvent():
                return last if last is not None and last.time >= event.time else None
    return last
