"""The stories of a run: failures, changes, restarts, handled faults and notices, and their effect on the result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_rocm.page_parts.texts import t
from lora_rocm.report.incident_texts import promise, trouble_text
from lora_rocm.rundir.event_types import (
    ChangeEvent,
    ErrorEvent,
    FailureEvent,
    IncidentEvent,
    NoticeEvent,
    RestartEvent,
)
from lora_rocm.rundir.run_view import RunView

MAX_STORIES, MAX_LOG_LINES, MAX_SAMPLES = 50, 40, 5
DAY = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class Story:
    """Something that happened to a run.

    Attributes:
        kind: failure, change, restart, incident or notice.
        when: the local time.
        text: what happened, in one line.
        logs: titles and ends of the logs before a failure.
    """

    kind: str
    when: str
    text: str
    logs: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Stories:
    """The stories of a run. meaning: their effect on the result; empty if there are none."""

    found: Sequence[Story]
    num_more: int
    meaning: str


@dataclass(frozen=True)
class ShownProblem:
    """The error with which a run ended. problems: always empty; errors of commands may have several."""

    what: str
    where: str
    fix: str
    code: str
    problems: tuple[()] = ()


def problem_of(event: ErrorEvent | FailureEvent) -> ShownProblem:
    """Return the contents of the box about an event. ``what`` of a failure may contain a log, which is omitted."""
    what = next(iter(event.what.splitlines()), event.code)
    return ShownProblem(what, event.where, event.fix if isinstance(event, ErrorEvent) else "", event.code)


def stories_of(view: RunView, most: int = MAX_STORIES) -> Stories:
    """Return a run's failures, changes, restarts, handled faults and notices, the newest first."""
    trouble = [(event.time, _story(event, trouble_text(event))) for event in view.trouble]
    handled = [(event.time, _handled(event)) for event in view.all(IncidentEvent) if event.kind != "fp16-overflow"]
    notices = [(event.time, _story(event, event.text)) for event in view.all(NoticeEvent)]
    found = sorted([*trouble, *handled, *notices], key=lambda pair: pair[0])[::-1]  # of one time, the last one first
    stories = [story for _, story in found[:most]]
    return Stories(stories, len(found) - len(stories), promise(view.trouble) if view.trouble else "")


def _story(event: FailureEvent | ChangeEvent | RestartEvent | NoticeEvent, text: str) -> Story:
    logs = tuple(_logs(event)) if isinstance(event, FailureEvent) else ()
    return Story(event.type, _when(event.time), text, logs)


def _handled(event: IncidentEvent) -> Story:
    places = ", ".join([f"iteration {event.iteration}", *map(str, (event.samples or [])[:MAX_SAMPLES])])
    return Story(event.type, _when(event.time), f"{event.detail} ({places}): {event.action}.")


def _when(time_s: float) -> str:
    return time.strftime(DAY, time.localtime(time_s))


def _logs(failure: FailureEvent) -> Iterator[tuple[str, str]]:
    """The last lines of the worker's log and of the kernel log before a failure."""
    for title, lines in (("worker_log", failure.what.splitlines()[1:]), ("kernel_log", failure.kernel_log)):
        if lines:
            yield t(f"story.{title}"), "\n".join(map(str, lines[-MAX_LOG_LINES:]))
