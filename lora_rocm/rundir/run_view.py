"""A view of a run, read from its files. ``status``, the report, the progress display and ``runs`` all use it.

It is computed from locks, events and results on each use, and not stored. It is in this package because the supervisor
and all commands may import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from lora_rocm.errors import StoppedError, UserError
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.rundir.event_index import read_log
from lora_rocm.rundir.event_log import EventLog, Steps
from lora_rocm.rundir.event_types import (
    CheckpointEvent,
    DataEvent,
    EndEvent,
    ErrorEvent,
    Event,
    FailureEvent,
    StartEvent,
    TelemetryEvent,
)
from lora_rocm.rundir.events import EventReader, size_if_there, unread_text
from lora_rocm.rundir.fork_origin import ForkOrigin, fork_origin
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.incidents import KINDS, Trouble, in_time, last_word
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.made_from import Stale, stale_exports
from lora_rocm.rundir.results import faults_of_finished, lost_loras_text, result_files
from lora_rocm.rundir.whole_files import WholeCheckpoint, fault_of_lora, newest_checkpoint, remedy

E = TypeVar("E", bound=Event)

Outcome = Literal["finished", "stopped", "failed", "died", "prepared"]
State = Literal["running"] | Outcome
RATE_STEPS = 50


@dataclass(frozen=True)
class RunFiles:
    """The files that a run has written for its user, and its checkpoints.

    Attributes:
        whole: intact, current files: LoRA files with the newest step last, then the report.
        damaged: damaged files, with their fault.
        stale: files from an earlier step than the run's current one.
        lost: sentences about missing LoRA files of checkpoints.
        checkpoint: the newest intact checkpoint, or None.
        passed_over: damaged checkpoints newer than ``checkpoint``, with their fault.
    """

    whole: list[Path]
    damaged: dict[Path, str]
    stale: dict[Path, Stale]
    lost: list[str]
    checkpoint: WholeCheckpoint | None
    passed_over: dict[Path, str]


@dataclass(frozen=True)
class RunView:
    """The state of one run at one moment.

    Attributes:
        log: the events of rank 0, including steps that were repeated later.
        supervisor: the events of the supervisor.
        trouble: failures, changes and restarts, in order of time.
        is_running: whether a process holds a lock of the run directory.
    """

    run_dir: RunDir
    log: EventLog
    supervisor: EventLog
    trouble: list[Trouble]
    is_running: bool

    @classmethod
    def of(cls, run_dir: RunDir | Path | str, *, use_index: bool = True, last_steps: int | None = None) -> RunView:
        """Read a run directory, also while the run is training.

        Args:
            run_dir: the run directory.
            use_index: whether an index of the events may be used (``event_index``).
            last_steps: number of newest steps that must be read, or None for all.

        Raises:
            UserError: no-run: there is no run at this path.
            StorageError: an event file is not a regular file (``events.size_if_there``).
        """
        if not isinstance(run_dir, RunDir):
            place, run_dir = run_dir, RunDir(Path(run_dir).absolute())
            if not run_dir.holds_run():
                fix = "Use a run directory (runs/...)."
                raise UserError("no-run", "There is no run here.", where=str(place), fix=fix)
        running = is_running(run_dir)  # first: if the run ends meanwhile, its end is still read below
        log = read_log(run_dir.events(), use_index=use_index, last_steps=last_steps)
        supervisor = read_log(run_dir.events(SUPERVISOR), use_index=use_index)
        return cls.of_logs(run_dir, log, supervisor, is_running=running)

    @classmethod
    def of_logs(cls, run_dir: RunDir, log: EventLog, supervisor: EventLog, *, is_running: bool) -> RunView:
        """Return the view of events that were read already: rank 0's and the supervisor's.

        Raises:
            StorageError: an event file of another rank is not a regular file.
        """
        others = (EventReader(path, kinds=KINDS).poll() for path in run_dir.events_of_others())
        trouble = in_time(supervisor.in_order(*KINDS), [log.in_order(*KINDS), *others])
        return cls(run_dir, log, supervisor, trouble, is_running)

    def all(self, kind: type[E]) -> list[E]:
        """Rank 0's events of a type, in the order written."""
        return self.log.all(kind)

    def last(self, kind: type[E]) -> E | None:
        """Rank 0's newest event of a type, or None."""
        found = self.log.all(kind)
        return found[-1] if found else None

    # Its state

    @property
    def state(self) -> State:
        """The run's ``outcome``, or "running"."""
        return "running" if self.is_running else self.outcome

    @cached_property
    def outcome(self) -> Outcome:
        """The run's result so far.

        It does not depend on the lock, which the process that writes the report still holds.

        It is finished, stopped (on request), failed (with an error or a hang), died (without an error), or prepared
        (never started).
        """
        if self.run_dir.result.exists():
            return "finished"
        if self.hang is not None:
            return "failed"
        match self.end:
            case EndEvent():
                return "stopped"
            case ErrorEvent(exit_code=StoppedError.exit_code):
                return "stopped"
            case ErrorEvent():
                return "failed"
        return "died" if self.log.last_s is not None else "prepared"

    @cached_property
    def end(self) -> EndEvent | ErrorEvent | None:
        """The event with which the worker ended since its last start; None if it has not reported an end."""
        for event in reversed(self.log.in_order(StartEvent, EndEvent, ErrorEvent)):
            match event:
                case EndEvent() | ErrorEvent():
                    return event
                case StartEvent():
                    break
        return None

    @cached_property
    def hang(self) -> FailureEvent | None:
        """The supervisor's failure event of the last start, if the worker hung or was killed and so reported no end."""
        return last_word(self.log.in_order(StartEvent, EndEvent, ErrorEvent), self.trouble)

    @property
    def problem(self) -> FailureEvent | ErrorEvent | None:
        """The event with the cause of the failure; None if the run did not fail."""
        if self.outcome != "failed":
            return None
        return self.hang or self.last(ErrorEvent)

    @property
    def latest_s(self) -> float | None:
        """Time of the last event by or about the worker; GPU readings are not considered."""
        times = [event.time for event in self.trouble[-1:]]
        return max(times + ([] if self.log.last_s is None else [self.log.last_s]), default=None)

    # Its steps

    @cached_property
    def steps(self) -> Steps:
        """The current steps, ordered by update number.

        If a step was repeated after a resume, only the newest one is included.
        """
        return self.log.current_steps()

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of every step that has one."""
        return self.steps.curve("loss")

    @property
    def updates(self) -> int:
        """Number of updates made."""
        start, done = self.last(StartEvent), self.steps.whole["updates"]
        forked = self.forked_from.step if self.forked_from is not None else 0
        return max((start.resumed_from or 0) if start else forked, done[-1] if done else 0)

    @cached_property
    def forked_from(self) -> ForkOrigin | None:
        """The parent of a forked run, or None."""
        return fork_origin(self.run_dir)

    @property
    def max_train_steps(self) -> int | None:
        """Total number of updates, or None if it is not known yet."""
        data = self.last(DataEvent)
        return data.max_train_steps if data else None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean duration of the last steps."""
        recent = self.steps.real["step_s"][-RATE_STEPS:]
        return sum(recent) / len(recent) if recent else None

    @property
    def readings(self) -> list[TelemetryEvent]:
        """The last readings of each GPU."""
        return list({event.gpu: event for event in self.supervisor.all(TelemetryEvent)}.values())

    # Its files

    @cached_property
    def files(self) -> RunFiles:
        """The files that the run has written, and its newest intact checkpoint."""
        run_dir = self.run_dir
        stale = {each.path: each for each in stale_exports(run_dir).values()}
        files = [path for path in result_files(run_dir) if path not in stale]
        damaged = {path: fault for path in files if path != run_dir.report and (fault := fault_of_lora(path))}
        checkpoint, passed_over = newest_checkpoint(run_dir)
        whole = [path for path in files if path not in damaged]
        return RunFiles(whole, damaged, stale, lost_loras_text(run_dir, self._written_loras()), checkpoint, passed_over)

    def _written_loras(self) -> dict[int, str]:
        """The LoRA files of checkpoints that the run wrote, by step, without steps that were rolled back later."""
        written: dict[int, str] = {}
        for event in self.log.in_order(StartEvent, CheckpointEvent):
            match event:
                case StartEvent():
                    resumed = event.resumed_from or 0
                    written = {updates: path for updates, path in written.items() if updates <= resumed}
                case CheckpointEvent(lora=str(lora)):
                    written[event.updates] = lora
        return written

    @cached_property
    def remarks(self) -> list[str]:
        """Sentences about missing, damaged, outdated or unreadable files."""
        return [*self._remarks_on_files(), *self.remarks_on_events()]

    def _remarks_on_files(self) -> Iterator[str]:
        run_dir, files = self.run_dir, self.files
        if self.state == "finished":
            yield from faults_of_finished(run_dir)
        yield from (f"{path}: {fault} {remedy(run_dir, path)}" for path, fault in files.damaged.items())
        yield from (each.sentence for each in files.stale.values())
        yield from files.lost
        yield from (f"{folder} is damaged and was skipped. {fault}" for folder, fault in files.passed_over.items())
        if files.checkpoint is not None and files.checkpoint.unread_bytes:
            of = f"the checksums of {size_text(files.checkpoint.unread_bytes)} were not compared here"
            yield f"{files.checkpoint.path}: {of}; a resume and an export compare them."
        if run_dir.names_are_wrong:
            what = (
                f"{run_dir.names} is gone or damaged. According to other files of the run, the name is {run_dir.name};"
            )
            yield f"{what} lora-rocm train --resume rewrites {run_dir.names.name}."

    def remarks_on_events(self) -> Iterator[str]:
        """Remarks on unreadable event files. One torn line per start is normal, and is ignored."""
        for path, log in ((self.run_dir.events(), self.log), (self.run_dir.events(SUPERVISOR), self.supervisor)):
            if text := unread_text(path):
                yield text
            aside = log.set_aside
            if aside.lines > max(len(self.all(StartEvent)), 1):
                yield f"{path}: {count_text(aside.lines, 'line')} cannot be read as events, and were skipped."
            if unknown := sorted({*aside.kinds, *aside.fields}):
                names = f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}"
                yield f"{path}: another version of lora-rocm wrote to this file. This version does not know {names}."
        new_fork = self.forked_from is not None and self.run_dir.list_checkpoints()[-1:] == [
            (self.forked_from.step, self.run_dir.checkpoint(self.forked_from.step))
        ]
        has_files = (self.files.checkpoint or self.files.passed_over) and not new_fork
        if self.latest_s is None and (has_files or size_if_there(self.run_dir.events())):
            yield "its events are gone or damaged, so steps, loss and rate are unknown"
