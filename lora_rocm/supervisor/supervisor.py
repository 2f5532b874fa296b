"""The supervisor: starts the workers, kills them if one hangs, applies mitigations, and restarts them.

It carries out decisions that other modules make without clock or files: ``supervisor.hang_detection`` detects hangs,
and ``supervisor.restart_policy`` chooses the reaction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from lora_rocm.errors import RestartCode, StoppedError, StorageError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import write_atomic, write_json
from lora_rocm.processes.process import POLL_S, Asked, OnEvent, stop_signals
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules import mitigation_store
from lora_rocm.rules.environment import environment_json, plan
from lora_rocm.rules.kernel_log import ClockReading, lines_since, patterns
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rules.rule import Situation
from lora_rocm.rundir import event_types
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.events import EventWriter, read_events
from lora_rocm.rundir.exit_status import size_of
from lora_rocm.rundir.fork_origin import fork_origin
from lora_rocm.rundir.heartbeat import read_heartbeat
from lora_rocm.rundir.incidents import trouble_of
from lora_rocm.rundir.layout import CHECKPOINT_NAME, SUPERVISOR, RunDir
from lora_rocm.supervisor import restart_policy as policy
from lora_rocm.supervisor.hang_detection import ENCODED, Hung, Learned, Limits, WatchState, culprit, decide, limits_of
from lora_rocm.supervisor.telemetry import Telemetry
from lora_rocm.supervisor.worker_group import DIED, End, environments, verdict
from lora_rocm.supervisor.worker_process import Worker, follow, last_checkpoint_text, unkillable

STACKS_POLL_S, STACKS_EXTRA_S, MAX_STACKS_S = 0.05, 0.5, 5.0
MAX_STACKS_BYTES = 1 << 24
UNKILLABLE: RestartCode = "worker-unkillable"
KERNEL_LOG_CODES: tuple[RestartCode, ...] = (DIED, "worker-hung", UNKILLABLE, "device-fault")
"""Error codes after which the kernel log is read. Reading it takes a moment, and other errors do not need it."""

Keep = Callable[[Situation, Sequence[str], str], None]


class CommandBuilder(Protocol):
    """Function that returns the worker's command line."""

    def __call__(self, checkpoint: Path | None, attempt: int, stacks_after_s: Mapping[str, float]) -> list[str]: ...


def in_force(run_dir: RunDir, situation: Situation, notify: Callable[[str], None]) -> Situation:
    """Return the situation with the recipe changes that apply to this run.

    A new run uses the changes stored for this machine, and records them. A resumed run keeps the changes that it
    started with, even if other runs have stored new ones since. A fork keeps its parent's.
    """
    events = read_events(run_dir.events())
    trouble = trouble_of(run_dir, events)
    if events or trouble or fork_origin(run_dir) is not None:
        return replace(situation, changes=policy.changes_of(trouble))
    for sentence in mitigation_store.notices(situation):
        notify(sentence)
    for change in situation.changes:
        record(run_dir, 1, change_event(change, policy.REMEMBERED))
    return situation


def record(run_dir: RunDir, session: int, event: Event) -> Event:
    """Write one event of the supervisor to the run directory, and return the event as written."""
    writer = EventWriter(run_dir.events(SUPERVISOR), session)
    try:
        return writer.write(event)
    finally:
        writer.close()


@dataclass
class Supervisor:
    """One ``train`` command, from its first start of the worker to its last.

    Attributes:
        run_dir: the run directory, prepared and locked.
        situation: the situation with the changes of this run (``in_force``).
        command: function that returns the worker's command line.
        checkpoint: checkpoint to start from, used until a start has completed a step; None means the newest valid one.
        on_event: function that is called in this thread with each event of the worker and the supervisor.
        notify: function that shows a message to the user.
        again: command with which the user can resume the run.
        keep: function that stores changes for this machine when a failure made them necessary.
        read_log: function that returns the lines of the kernel log since a time.
        size: number of workers that train together.
        telemetry: reader of the GPU's sensors; by default it reads nothing.
        asked: requests to stop; None means Ctrl-C, SIGTERM and the closing of the terminal.
    """

    run_dir: RunDir
    recipe: Recipe
    situation: Situation
    command: CommandBuilder
    on_event: OnEvent
    notify: Callable[[str], None]
    checkpoint: Path | None = None
    again: str = ""
    keep: Keep = lambda situation, changes, seen: None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    clock: Callable[[], float] = time.monotonic
    read_log: Callable[[ClockReading], tuple[str, ...]] = lines_since
    pauses_s: Sequence[float] = policy.PAUSES_S
    size: int = 1
    telemetry: Telemetry = field(default_factory=Telemetry)
    asked: Asked | None = None

    def __post_init__(self) -> None:
        past = read_events(self.run_dir.events(SUPERVISOR))
        self._history = policy.History(self.recipe.runtime.max_restarts, attempt=policy.attempt_of(past))
        self._learned = Learned()
        self._newest = _updates_of(self.checkpoint) if self.checkpoint else newest_checkpoint(self.run_dir)
        self._items: dict[str, int] = {}
        self._planned = plan(self.situation)
        self._session = 0

    def run(self) -> int:
        """Start the worker, again if needed, until it has finished; return its exit code.

        Raises:
            LoraRocmError: an error occurred that no restart can fix.
            GaveUpError: the budget of restarts is used up.
            StoppedError: the user asked to stop, and the worker had to be killed.
            WorkerHungError: the worker hung and there is no restart, or it cannot be killed.
        """
        self.run_dir.stop.unlink(missing_ok=True)  # writes: removes the link, where there is one
        with stop_signals() if self.asked is None else nullcontext(self.asked) as asked:
            while True:
                outcome = self._start(asked)
                if isinstance(outcome, int):
                    return outcome
                failure, first = outcome
                self._settle(failure, first, stop=self._stops(asked))
                self._pause(self._history.pause_s(self.pauses_s), asked)
                if first.steps:  # without a step, checkpoints newer than the chosen one still exist
                    self.checkpoint = None

    def _pause(self, seconds: float, asked: Asked) -> None:
        """Wait before a restart.

        Raises:
            StoppedError: the user asked to stop during the wait. No worker is running, so nothing can be saved.
        """
        if seconds:
            self.notify(f"The next start is in {seconds:g} s.")
        until = time.monotonic() + seconds
        while not self._stops(asked) and time.monotonic() < until:
            time.sleep(POLL_S)
        if self._stops(asked):
            raise StoppedError("stopped", f"Stopped before the next start. {last_checkpoint_text(self.run_dir)}")

    def _stops(self, asked: Asked) -> bool:
        return asked.level > 0 or self.run_dir.stop.exists()

    def _start(self, asked: Asked) -> int | tuple[policy.WorkerFailure, WatchState]:
        """Start the workers once. Return their exit code, or the failure and the state of the worker with rank 0."""
        # Prepare the watch states and the command
        patterns()  # read now: after a failure the package may be unreachable
        limits = limits_of(self.recipe, self._planned.settings)
        stacks_after_s = limits.stacks_after_s()
        run_dir, began = self.run_dir, ClockReading.now()
        self._session = 1 + len(read_events(run_dir.events(), event_types.StartEvent))
        states = [self._state(limits, rank) for rank in range(self.size)]
        command = self.command(self.checkpoint, self._history.attempt, stacks_after_s)
        hung: dict[int, Hung] = {}
        # Start the workers and follow them
        with ExitStack() as stack:
            envs = environments(self._planned.applied_to(self.environ), self.size)
            workers = [stack.enter_context(Worker(run_dir, env, command, rank)) for rank, env in enumerate(envs)]
            stack.enter_context(self.telemetry.watching([worker.pid for worker in workers], self._emit))
            on_event = partial(self._take, states)
            if follow(workers, asked, on_event, self.notify, partial(self._is_late, states, hung)):
                # One hangs: keep its stacks, kill all
                late = workers[next(iter(hung))]
                self._keep_stacks(late, states[late.rank], stacks_after_s.get(states[late.rank].limit, 0.0))
                for worker in workers:
                    worker.given_up = worker is not late
                    if not worker.kill():
                        error = unkillable(worker.pid, self.again)
                        self._emit(self._failure(End(worker, error), hung, states, began).to_event())
                        raise error
                follow(workers, asked, on_event, self.notify)  # their last events
            # All have ended
            found = verdict(workers)
            if isinstance(found, int):
                return found
            for worker in workers:
                worker.kill()  # also kills remaining processes that it started
            if hung and found.error.code == DIED and self._stops(asked):
                limit_s = hung[found.worker.rank].limit_s
                what = f"The training process did not stop within {limit_s:g} s and was killed."
                raise StoppedError("killed", f"{what} {last_checkpoint_text(run_dir)}") from None
            return self._failure(found, hung, states, began), states[0]

    def _state(self, limits: Limits, rank: int) -> WatchState:
        run_dir = self.run_dir
        with suppress(OSError):  # a folder of that name: the worker reports it
            run_dir.stacks(rank).unlink(missing_ok=True)  # writes: removes the link, where there is one
        return WatchState(
            limits,
            self.clock(),
            self._learned,
            updates=self._newest,
            beat=read_heartbeat(run_dir.heartbeat(rank)),
            log_bytes=size_of(run_dir.log_of(rank)),
        )

    def _take(self, states: Sequence[WatchState], rank: int, event: Event) -> None:
        state = states[rank]
        state.on_event(event, self.clock())
        if rank == 0:
            self.on_event(event)
            self.telemetry.on_event(event)
        if isinstance(event, event_types.ChangeEvent):
            change = event.id  # ranks run out of memory together: count a change of several once
            if all(state.changes[change] > other.changes[change] for other in states if other is not state):
                if rank:
                    self.on_event(event)
                self._change([change], event.seen)

    def _is_late(self, states: Sequence[WatchState], hung: dict[int, Hung]) -> bool:
        """Return whether a worker hangs, and record it in ``hung`` by its rank.

        If several workers are silent, the one that the others wait for is recorded.
        """
        self.telemetry.poll()
        now = self.clock()
        for rank, state in enumerate(states):
            state.on_poll(now)
            state.on_heartbeat(read_heartbeat(self.run_dir.heartbeat(rank)), now)
            state.on_log(size_of(self.run_dir.log_of(rank)), now)
        late = {rank: found for rank, state in enumerate(states) if (found := decide(state, now)) is not None}
        if late:
            rank = culprit(states)
            hung[rank] = late.get(rank, next(iter(late.values())))
        return bool(hung)

    def _keep_stacks(self, worker: Worker, state: WatchState, after_s: float) -> None:
        """Save a copy of the stacks that a hanging worker writes, after waiting a moment for them.

        A worker writes none before its first heartbeat or while it exits.
        """
        stacks = self.run_dir.stacks(worker.rank)
        deadline = time.monotonic() + min(after_s, MAX_STACKS_S) + STACKS_EXTRA_S
        while state.left_at is None and not size_of(stacks) and time.monotonic() < deadline:
            time.sleep(STACKS_POLL_S)
        if size_of(stacks):
            with suppress(OSError, StorageError):  # a failure to keep evidence must not stop the run
                content = read_plain(stacks, MAX_STACKS_BYTES)
                write_atomic(self.run_dir.stacks_kept(self._session), content, self.run_dir.path)

    def _failure(
        self, end: End, hung: Mapping[int, Hung], states: Sequence[WatchState], began: ClockReading
    ) -> policy.WorkerFailure:
        """Return the failure of a start.

        An error reported by the worker takes precedence over a hang during its exit.
        """
        error, state = end.error, states[end.worker.rank]
        late = hung.get(end.worker.rank) if error.code in (DIED, UNKILLABLE) else None
        if late is not None and error.code == DIED:
            whose = f"rank {end.worker.rank}, " if self.size > 1 else ""
            error = policy.hung_error(late, f"{whose}phase {state.phase}, after step {state.updates}")
        lines = self.read_log(began) if error.code in KERNEL_LOG_CODES else ()
        stacks = self.run_dir.stacks_kept(self._session)
        return policy.WorkerFailure(
            seen=policy.seen_of(error, late, lines, end.worker.pid, first=not self._history.failures),
            phase=state.phase,
            activity=state.activity,
            updates=state.updates,
            error=error,
            silent_s=late.silent_s if late else None,
            limit_s=late.limit_s if late else None,
            stacks=stacks.name if late and stacks.exists() else None,
            kernel_log=lines,
            changed=any(policy.relieved(state.changes, state.phase) for state in states),
        )

    def _settle(self, failure: policy.WorkerFailure, state: WatchState, *, stop: bool) -> None:
        """Decide how to react to a failure, and prepare the restart.

        Raises:
            LoraRocmError: there is no restart.
        """
        if failure.seen is None:
            raise failure.error
        history = self._history.with_failure(failure, self._has_progressed(state), state.checkpoints)
        self._emit(failure.to_event())
        judgement = policy.Raise(failure.error) if stop else policy.after(failure, history, self.situation)
        if isinstance(judgement, policy.Raise):
            raise judgement.error
        if isinstance(judgement, policy.GiveUp):
            raise policy.gave_up(history, judgement.reason, self.situation.changes, str(self.run_dir.path), self.again)
        self._history = history.with_restart(judgement)
        self._prepare(failure, judgement)

    def _prepare(self, failure: policy.WorkerFailure, restart: policy.Restart) -> None:
        """Apply the changes of a restart, and write its events."""
        for change in restart.changes:
            self._emit(change_event(change, str(failure.seen)))
        self._change(restart.changes, str(failure.seen))
        planned = plan(self.situation)
        if planned != self._planned:
            write_json(self.run_dir.environment, environment_json(planned, self.situation.facts), self.run_dir.path)
            self._planned = planned
        history = self._history
        self._emit(
            event_types.RestartEvent(
                number=len(history.failures),
                spent=history.spent,
                budget=history.budget,
                progress=history.progress,
                from_updates=self._newest,
                attempt=history.attempt,
                changes=list(self.situation.changes),
            )
        )

    def _has_progressed(self, state: WatchState) -> bool:
        """Whether the start got further than the previous one: it wrote a newer checkpoint, or more cache entries."""
        newest = newest_checkpoint(self.run_dir)
        items = {what: done for what, done in state.items.items() if what in ENCODED}
        further = newest > self._newest or any(done > self._items.get(what, 0) for what, done in items.items())
        self._newest, self._items = newest, {**self._items, **items}
        return further

    def _change(self, changes: Sequence[str], seen: str) -> None:
        """Apply changes, and store all of them at once for this machine, because single ones may not be enough."""
        for change in changes:
            self.situation = policy.changed(self.situation, change)
        if changes:
            self.keep(self.situation, changes, seen)

    def _emit(self, event: Event) -> None:
        self.on_event(record(self.run_dir, self._session, event))


def newest_checkpoint(run_dir: RunDir) -> int:
    """Return the number of updates at the newest checkpoint; 0 if there is none."""
    checkpoints = run_dir.list_checkpoints()
    return checkpoints[-1][0] if checkpoints else 0


def _updates_of(checkpoint: Path) -> int:
    found = CHECKPOINT_NAME.match(checkpoint.name)
    return int(found.group(1)) if found else 0
