"""Hang detection: a state that is updated from the worker's events and heartbeats, and a function that decides from it.

The module reads no clock and no file. The caller passes the time of each sign of life, in seconds of a monotonic clock.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from lora_rocm.rundir import event_types
from lora_rocm.rundir.heartbeat import Heartbeat

if TYPE_CHECKING:
    from lora_rocm.hardware.settings import Settings
    from lora_rocm.recipe.schema import Recipe

CLASS_IMAGES = "class-images"
LEAVING, LEAVING_S = "leaving", 60.0
"""Name of the limit after the worker's last event, and the seconds that the worker then has to exit.

On Windows, a process that uses a GPU may hang while it exits (pytorch#160759).
"""
LOADER_EXTRA_S = 150.0
"""Seconds that hang detection waits longer than the loader, which itself stops silent loader workers."""
ABSENT_S = 10.0
"""Seconds between two checks above which this process or the whole machine must have been paused (suspend)."""
RECENT = 50
ENCODED = ("images", "captions")
"""Outputs of encoders, as named in ``cache`` events. Other names there belong to the inspection of files."""
WAITING = ("verdict", "ranks")
"""Activities of a worker that waits for other ranks."""
LEAST_STACKS_S = 0.2


@dataclass
class Learned:
    """Recent durations in this run, over all its starts: seconds per step, per cached item and per preview round."""

    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    item_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    preview_s: float | None = None


@dataclass(frozen=True)
class Limit:
    """A rule for the longest time that a worker may be silent in a phase.

    Attributes:
        first_s: limit in seconds as long as no usual duration is known.
        floor_s: smallest limit once the usual duration is known.
        times: factor by which the usual duration is multiplied for the limit.
        usual: function that returns the usual duration in seconds, or None if it is not known yet.
        log_counts: whether output to the log is a sign of life. This is True only where a hub model may be downloaded,
            which has no other sign. Elsewhere, a worker can hang and still write to its log.
    """

    first_s: float
    floor_s: float = 0.0
    times: float = 0.0
    usual: Callable[[Learned], float | None] = lambda learned: None
    log_counts: bool = False

    @property
    def least_s(self) -> float:
        return min(self.first_s, self.floor_s) if self.times else self.first_s


LIMITS: dict[str, Limit] = {
    "start": Limit(300.0, log_counts=True),
    "load": Limit(3600.0, log_counts=True),
    "cache_first": Limit(1800.0, log_counts=True),
    "cache": Limit(1800.0, 300.0, 20.0, lambda learned: _median(learned.item_s)),
    CLASS_IMAGES: Limit(3600.0, log_counts=True),
    "compile": Limit(3600.0),
    "first_step": Limit(1800.0),
    "step": Limit(300.0, 300.0, 20.0, lambda learned: _median(learned.step_s)),
    "checkpoint": Limit(600.0),
    "preview": Limit(3600.0, 600.0, 5.0, lambda learned: learned.preview_s),
    "export": Limit(3600.0),
    LEAVING: Limit(LEAVING_S),
}
"""Limits by phase, with special names for some parts of phases. Unlisted phases, and the time between phases, have the
limit "start".

Work that some of the limits must allow for:

class-images: the base model is loaded, or some of the images are generated.
cache_first: an encoder is loaded before the first image and before the first caption.
compile: a whole component can be compiled at once, which takes many minutes on a slow host.
"""
RECIPE_KEYS = {"cache_first": "cache", CLASS_IMAGES: "preview"}
"""Name in the recipe's ``timeouts`` of each limit that has a different name there."""


def _median(values: deque[float]) -> float | None:
    return median(values) if values else None


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Attributes:
        given_s: limits from the recipe's ``timeouts`` by name, in seconds. Each replaces a whole ``Limit``.
        loader_s: smallest limit while the worker waits for the loader; 0 without loader workers.
    """

    given_s: dict[str, float] = field(default_factory=dict)
    loader_s: float = 0.0

    def seconds(self, name: str, learned: Learned) -> float:
        """Return the current limit of this name, in seconds."""
        limit = LIMITS[name]
        given, usual = self.given_s.get(RECIPE_KEYS.get(name, name)), limit.usual(learned)
        if given is not None:
            return given
        return limit.first_s if usual is None else max(limit.floor_s, limit.times * usual)

    def stacks_after_s(self) -> dict[str, float]:
        """Return the seconds of silence after which the worker writes its stacks, for each limit.

        This is half of the limit's smallest possible value. A shorter time would be riskier: to write the stacks,
        faulthandler reads data that the running threads are changing. This can crash the process (with CPython 3.11,
        always during an import).
        """
        least_s = {name: self.given_s.get(RECIPE_KEYS.get(name, name), limit.least_s) for name, limit in LIMITS.items()}
        return {name: max(seconds / 2, LEAST_STACKS_S) for name, seconds in least_s.items() if name != LEAVING}


def limits_of(recipe: Recipe, settings: Settings, system: str = sys.platform) -> Limits:
    """Return the limits for a worker with this recipe and these settings."""
    given = {name: value for name, value in recipe.timeouts.model_dump().items() if value is not None}
    has_workers = recipe.runtime.workers_on(system) > 0 and settings.loader_workers != 0
    return Limits(given, recipe.runtime.worker_timeout_s + LOADER_EXTRA_S if has_workers else 0.0)


@dataclass(frozen=True)
class Hung:
    """A hang: the worker was silent for longer than the limit.

    limit: name of the limit in the recipe's ``timeouts``, or "leaving".
    """

    phase: str
    activity: str
    silent_s: float
    limit_s: float
    limit: str


@dataclass
class WatchState:
    """The known state of one start of the worker.

    Attributes:
        heard_at: time of the worker's last sign of life.
        learned: usual durations, shared by all starts of a run.
        phases: current phases, from the outermost to the innermost.
        activity: the worker's activity according to its heartbeat.
        steps: number of steps that this start has completed.
        checkpoints: number of checkpoints that this start has written.
        items: number of cached entries of each kind.
        changes: number of times that this start itself applied each mitigation.
        beat: last heartbeat that was read, perhaps from an earlier worker.
        log_bytes: last size of the log that was read.
        left_at: time of the worker's last event (``end`` or ``error``), or None.
    """

    limits: Limits
    heard_at: float
    learned: Learned = field(default_factory=Learned)
    phases: list[str] = field(default_factory=list)
    activity: str = "start"
    updates: int = 0
    steps: int = 0
    checkpoints: int = 0
    items: dict[str, int] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    beat: Heartbeat | None = None
    log_bytes: int = 0
    left_at: float | None = None
    _filling: bool = False  # an encoder is loaded and has more to encode
    _item_at: float = 0.0
    _looked_at: float | None = None

    @property
    def phase(self) -> str:
        """The current phase, as named in events. It is "start" before the first phase and between two phases."""
        return self.phases[-1] if self.phases else "start"

    @property
    def limit(self) -> str:
        """Name of the limit that applies now."""
        name = self.phase
        if self.left_at is not None:
            return LEAVING
        if name == "cache" and not self._filling:
            return "cache_first"
        if name == "step" and not self.steps:
            return "first_step"
        return name if name in LIMITS else "start"

    def on_event(self, event: event_types.Event, now: float) -> None:
        """Update the state from an event."""
        self.heard_at = now
        match event:
            case event_types.StartEvent():  # earlier events are the last ones of an orphan that this worker waited for
                self.phases, self.steps, self.left_at = [], 0, None
                self.updates = event.resumed_from or 0
            case event_types.PhaseEvent():
                self._on_phase(event)
            case event_types.CacheEvent():
                self._on_cache(event, now)
            case event_types.StepEvent():
                self.steps += 1
                self.updates = event.updates
                self.learned.step_s.append(event.step_s)
            case event_types.CheckpointEvent():
                self.checkpoints += 1
            case event_types.ChangeEvent():
                self.changes[event.id] += 1
            case event_types.EndEvent() | event_types.ErrorEvent():
                self.left_at = now

    def _on_phase(self, event: event_types.PhaseEvent) -> None:
        if event.state == "begin":
            self.phases.append(event.phase)
            self._filling = False
        elif event.phase in self.phases:
            while self.phases.pop() != event.phase:
                pass
            if event.phase == "preview":
                self.learned.preview_s = max(event.seconds, self.learned.preview_s or 0.0)

    def _on_cache(self, event: event_types.CacheEvent, now: float) -> None:
        what, done = event.what, event.done
        more = done - self.items.get(what, done)
        if self._filling and more > 0 and what in ENCODED:
            self.learned.item_s.append((now - self._item_at) / more)
        self.items[what] = done
        waits_for_encoder = what in ENCODED and not event.per_second  # all entries so far were already in the cache
        self._item_at, self._filling = now, done < event.total and not waits_for_encoder

    def on_heartbeat(self, beat: Heartbeat | None, now: float) -> None:
        """Update the state from a heartbeat. It is a sign of life only if its count has changed."""
        before = self.beat
        if beat is None or (before is not None and (beat.pid, beat.count) == (before.pid, before.count)):
            return
        self.heard_at, self.beat, self.activity = now, beat, beat.activity

    def on_log(self, size_bytes: int, now: float) -> None:
        """Update the state from the size of the log, which is a sign of life in some phases."""
        if size_bytes != self.log_bytes and LIMITS[self.limit].log_counts:
            self.heard_at = now
        self.log_bytes = size_bytes

    def on_poll(self, now: float) -> None:
        """Record the time of a check. A long time without checks (``ABSENT_S``) does not count as silence."""
        absent_s = now - self._looked_at if self._looked_at is not None else 0.0
        if absent_s > ABSENT_S:
            self.heard_at = min(self.heard_at + absent_s, now)
            self.left_at = None if self.left_at is None else min(self.left_at + absent_s, now)
        self._looked_at = now


def culprit(states: Sequence[WatchState]) -> int:
    """Return the rank that the other ranks are waiting for."""
    busy = [rank for rank, state in enumerate(states) if state.activity not in WAITING]
    return min(busy or range(len(states)), key=lambda rank: states[rank].heard_at)


def decide(state: WatchState, now: float) -> Hung | None:
    """Return a description of the worker's hang, or None if it does not hang."""
    name = state.limit
    limit_s = state.limits.seconds(name, state.learned)
    if name == "step" and state.activity == "loader":
        limit_s = max(limit_s, state.limits.loader_s)
    silent_s = now - (state.heard_at if state.left_at is None else state.left_at)
    if silent_s <= limit_s:
        return None
    return Hung(state.phase, state.activity, silent_s, limit_s, RECIPE_KEYS.get(name, name))
