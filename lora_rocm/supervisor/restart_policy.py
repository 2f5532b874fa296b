"""The restart policy: decides after a worker's failure whether to restart, with which mitigation, or to give up.

The functions only compute; they start nothing and read no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lora_rocm.errors import GaveUpError, LoraRocmError, RestartCode, WorkerHungError
from lora_rocm.rules.environment import plan
from lora_rocm.rules.kernel_log import device_fault, killed_for_memory
from lora_rocm.rules.mitigations import Change, Seen, candidates, changes_by_id, known, seen_of_code
from lora_rocm.rules.rule import Situation
from lora_rocm.rundir.event_types import ChangeEvent, Event, FailureEvent, RestartEvent
from lora_rocm.supervisor.hang_detection import Hung

MAX_ROLLBACKS = 3
PAUSES_S = (0.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Seconds to wait before a restart, by the number of consecutive starts without progress.

A device needs time to reset.
"""
LONGER_AFTER: dict[Seen | None, int] = {"illegal-access": 2, "out-of-memory": 1}
"""Number of steps by which these failures advance in ``PAUSES_S``, for a longer pause.

A GPU after a reset, and the memory of a dead process, are not available at once.
"""
BEFORE_STEPS = ("start", "load")
"""Phases in which only the base model and the adapter need memory."""
GPU_IS_AWAY: tuple[RestartCode, ...] = ("gpu-not-seen", "no-gpu")
"""Error codes that may pass with time if they follow another failure of the same command, as a GPU returns after a
reset.
"""
REMEMBERED = "remembered"
"""Value of ``seen`` for a change that an earlier run on this machine made."""
WORDS: dict[Seen, str] = {
    "loader-hang": "hung while it waited for the next batch",
    "hang": "hung",
    "corruption": "data, weights or state were corrupted",
    "sum": "the sum of gradients of several GPUs was wrong",
    "illegal-access": "the GPU reported a fault or was reset",
    "out-of-memory": "memory ran out",
    "canary": "a calculation with a known answer came out wrong",
    "graph": "a captured GPU graph gave a different result than the same work launched kernel by kernel",
    "nonfinite": "loss or gradient was not finite",
    "died": "ended without an error message",
    "attention": "an attention backend gave wrong numbers",
}
NO_CURE: tuple[Seen, ...] = ("loader-hang", "hang", "died")
"""Kinds of failure for which the error's own advice is of no use if the failure is repeated."""


@dataclass(frozen=True)
class WorkerFailure:
    """The failure of one start of the worker. The fields are explained at the event ``failure``.

    Attributes:
        seen: kind of the failure, or None if no restart can help.
        changed: whether the worker itself applied a mitigation. The next start uses it from the beginning.
    """

    seen: Seen | None
    phase: str
    activity: str
    updates: int
    error: LoraRocmError
    silent_s: float | None = None
    limit_s: float | None = None
    stacks: str | None = None
    kernel_log: tuple[str, ...] = ()
    changed: bool = False

    def to_event(self) -> FailureEvent:
        return FailureEvent(
            seen=self.seen or "",
            phase=self.phase,
            activity=self.activity,
            updates=self.updates,
            silent_s=None if self.silent_s is None else round(self.silent_s, 3),
            limit_s=self.limit_s,
            code=self.error.code,
            what=self.error.what,
            where=self.error.where,
            stacks=self.stacks,
            kernel_log=list(self.kernel_log),
        )


@dataclass(frozen=True)
class History:
    """The earlier starts and failures of a run when a failure is judged.

    Attributes:
        budget: value of ``runtime.max_restarts``.
        spent: used part of the budget, without the failure to judge.
        attempt: number of times that the run was rolled back and given other noise, over all its commands.
        progressed: for each start of this command, whether it got further than the previous one. The failed start is
            last.
        failures: failures of this command. The one to judge is last.
    """

    budget: int
    spent: int = 0
    attempt: int = 0
    progressed: tuple[bool, ...] = ()
    failures: tuple[WorkerFailure, ...] = ()

    @property
    def progress(self) -> bool:
        return bool(self.progressed) and self.progressed[-1]

    @property
    def is_stuck(self) -> bool:
        """Whether two consecutive starts made no progress."""
        return len(self.progressed) > 1 and not any(self.progressed[-2:])

    @property
    def may_fit(self) -> bool:
        """Whether a restarted worker might fit into memory although no mitigation is left.

        Its memory is not fragmented. If the previous start also ran out of memory, and there was no progress, the next
        start would fail in the same way.
        """
        last, *before = reversed(self.failures)
        if self.progress or last.changed:
            return True
        if before:
            return before[0].seen != "out-of-memory"  # that process may still have used some of the memory
        return last.phase not in BEFORE_STEPS

    @property
    def cost(self) -> int:
        """Cost of a restart in the budget: 1, or 2 if the failed start made no progress.

        The first start always costs 1, because there is no earlier start to compare its progress with.
        """
        return 1 if self.progress or len(self.progressed) < 2 else 2

    def pause_s(self, pauses_s: Sequence[float] = PAUSES_S) -> float:
        """Return the seconds to wait before the restart."""
        further = [number for number, progress in enumerate(self.progressed, 1) if progress]
        in_vain = len(self.progressed) - max(further, default=0)
        place = max(in_vain - 1, 0) + LONGER_AFTER.get(self.failures[-1].seen, 0)
        return pauses_s[min(place, len(pauses_s) - 1)]

    def with_failure(self, failure: WorkerFailure, progress: bool, checkpoints: int) -> History:
        """Return the history extended by the failure of a start that wrote this many checkpoints."""
        return replace(
            self,
            spent=max(self.spent - checkpoints, 0),
            progressed=(*self.progressed, progress),
            failures=(*self.failures, failure),
        )

    def with_restart(self, restart: Restart) -> History:
        return replace(self, spent=self.spent + self.cost, attempt=restart.attempt)


@dataclass(frozen=True)
class Restart:
    """The decision to start again, with these changes in addition to the ones that are already used."""

    changes: tuple[str, ...]
    attempt: int


@dataclass(frozen=True)
class GiveUp:
    """The decision to give up, because the budget is spent or roll-backs do not help."""

    reason: str


@dataclass(frozen=True)
class Raise:
    """The decision to raise the error, because a restart would fail in the same way."""

    error: LoraRocmError


Judgement = Restart | GiveUp | Raise


def after(failure: WorkerFailure, history: History, situation: Situation) -> Judgement:
    """Decide how to react to a failure, which is the last one of ``history``."""
    if failure.seen is None or history.budget == 0:
        return Raise(failure.error)
    rollback = failure.seen == "nonfinite"
    if rollback and history.attempt >= MAX_ROLLBACKS:
        return GiveUp(
            f"{failure.error.what} The run was rolled back {history.attempt} times, each time with different noise."
        )
    change = next_change(failure.seen, failure.phase, situation)
    if failure.seen == "out-of-memory" and change is None and not history.may_fit:
        return Raise(failure.error)
    if history.spent + history.cost > history.budget:
        return GiveUp(f"The budget of restarts is used up (runtime.max_restarts: {history.budget}).")
    if failure.error.code in GPU_IS_AWAY or (failure.seen == "died" and not history.is_stuck):
        change = None  # a user may have killed it; any other cause would occur again
    return Restart((change.id,) if change is not None else (), history.attempt + rollback)


def next_change(seen: Seen, phase: str, situation: Situation) -> Change | None:
    """Return the mildest change against this failure that would have an effect, or None.

    The user's own settings are kept.
    """
    now = _outcome(situation)
    return next(
        (row for row in candidates(seen, phase, situation) if _outcome(changed(situation, row.id)) != now), None
    )


def relieved(changes: Iterable[str], phase: str) -> bool:
    """Whether one of these changes is a mitigation of out-of-memory in this phase."""
    rows = (changes_by_id()[change] for change in changes if change in changes_by_id())
    return any("out-of-memory" in row.seen and phase in row.phases for row in rows)


def changed(situation: Situation, *changes: str) -> Situation:
    """Return the situation with these changes added."""
    return replace(situation, changes=(*situation.changes, *changes))


def _outcome(situation: Situation) -> tuple[dict[str, str], object]:
    planned = plan(situation)
    return {row.variable: row.value for row in planned.variables if not row.from_user}, planned.settings


def seen_of(
    error: LoraRocmError, hung: Hung | None, kernel_log: tuple[str, ...], pid: int, *, first: bool = True
) -> Seen | None:
    """Return the kind of a failure, or None if no restart can help.

    ``first``: whether it is this command's first failure.
    """
    if hung is not None:
        seen: Seen | None = "loader-hang" if (hung.phase, hung.activity) == ("step", "loader") else "hang"
    else:
        seen = "illegal-access" if error.code in GPU_IS_AWAY and not first else seen_of_code(error.code)
    if seen in ("died", "hang"):
        if killed_for_memory(kernel_log, pid):
            return "out-of-memory"
        if device_fault(kernel_log):
            return "illegal-access"
    return seen


def hung_error(hung: Hung, where: str) -> WorkerHungError:
    """Return the error for a worker that was killed because it was silent for too long."""
    return WorkerHungError(
        "worker-hung",
        f"The training process was silent for {hung.silent_s:.3g} s in the phase {hung.phase} and was killed.",
        where=where,
        fix=f"lora-rocm doctor lists known problems of this machine. If it is only slow: --set timeouts.{hung.limit}="
        f"{max(round(2 * hung.limit_s), 1)} allows more than {hung.limit_s:g} s.",
    )


def changes_of(events: Iterable[Event]) -> tuple[str, ...]:
    """Return the changes made by these events. A change that was made several times is listed several times."""
    return known(event.id for event in events if isinstance(event, ChangeEvent))


def attempt_of(events: Iterable[Event]) -> int:
    """Return the number of roll-backs of a run, from its supervisor's ``restart`` events."""
    return max((event.attempt for event in events if isinstance(event, RestartEvent)), default=0)


def gave_up(history: History, reason: str, changes: Iterable[str], where: str, again: str) -> GaveUpError:
    """Return the error for a run that is given up, with its failures, the attempted changes, and advice.

    where: location that the error names.
    again: command that continues the run.
    """
    last = history.failures[-1]
    cure = f"{last.error.fix}\n" if last.error.fix and last.seen not in NO_CURE else ""
    return GaveUpError(
        "gave-up",
        account(history, reason, changes),
        where=where,
        fix=f"{cure}Everything up to the last checkpoint is kept. lora-rocm doctor lists known problems of this "
        f"machine. To continue:\n  {again}",
    )


def account(history: History, reason: str, changes: Iterable[str]) -> str:
    """Return a text for the user that lists the failures and the attempted changes."""
    counts = Counter((failure.seen, failure.phase) for failure in history.failures)
    lines = [reason]
    for (seen, phase), count in counts.items():
        steps = sorted(
            {failure.updates for failure in history.failures if (failure.seen, failure.phase) == (seen, phase)}
        )
        places = ", ".join(map(str, steps[:8])) + (" ..." if len(steps) > 8 else "")
        times = "once" if count == 1 else f"{count} times"
        lines.append(f"    {times}: {WORDS[seen] if seen else 'failed'} (phase {phase}, after step {places})")
    tried = [changes_by_id()[change].text for change in dict.fromkeys(changes) if change in changes_by_id()]
    lines.append("  changed since the start: " + ("; ".join(tried) if tried else "nothing"))
    return "\n".join(lines)
