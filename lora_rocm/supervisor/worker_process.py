"""The worker processes of a run: start, follow and stop them, and determine their result."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from lora_rocm.errors import (
    LoraRocmError,
    StoppedError,
    StorageError,
    WorkerHungError,
    resume_advice,
)
from lora_rocm.foundation.files import open_in_place
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.processes.process import (
    KILL_WAIT_S,
    POLL_S,
    Asked,
    OnEvent,
    error_from_event,
    heavy_command,
    kill_group,
    kill_tree,
    own_group,
    stop_signals,
)
from lora_rocm.processes.windows_job import JobObject
from lora_rocm.rundir.event_types import EndEvent, ErrorEvent, Event, StartEvent
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.exit_status import TAIL_BYTES, size_of, tail_bytes, worker_died_error
from lora_rocm.rundir.layout import RunDir

LOG = logging.getLogger(__name__)
LAST_WORDS_S = 1.0
"""Time in seconds in which the other workers can report their own errors after one has failed."""
STOPPING = "Finishing the step and saving. Press Ctrl-C again to end at once (the last checkpoint is kept)."
WORKER = "lora_rocm.train.worker"
PREPARE = "--prepare"
"""Option of the worker: it does not train (``commands.prepare``)."""
E = TypeVar("E", bound=LoraRocmError)


def worker_command(
    run_dir: RunDir,
    checkpoint: Path | None = None,
    accept_changes: bool = False,
    attempt: int = 0,
    stacks_after_s: Mapping[str, float] | None = None,
    worker: str | None = None,
    began_s: float | None = None,
) -> list[str]:
    """Return the command that starts the training process.

    checkpoint: checkpoint to resume from; None means the newest valid one.
    worker: module with the worker's ``main``; None means lora-rocm's own, with its own model families.
    began_s: time when the user's command began, in seconds since the epoch.
    """
    # input: the worker saves before it ends
    command = heavy_command(worker or WORKER, str(run_dir.path), reads_input=True)
    command += ["--checkpoint", str(checkpoint)] if checkpoint else []
    command += ["--accept-changes"] if accept_changes else []
    command += ["--attempt", str(attempt)] if attempt else []
    command += ["--began", str(began_s)] if began_s is not None else []
    return command + (["--stacks-after", json.dumps(stacks_after_s)] if stacks_after_s is not None else [])


class Worker:
    """A running training process. It has its own process group (a job object on Windows), which is killed as a whole.

    If this process ends for any reason, the worker's standard input is closed, and the worker exits by itself.

    Args:
        run_dir: the run directory, prepared and locked.
        env: complete environment of the worker.
        command: program and arguments from ``worker_command``.
        rank: rank of the worker.

    Attributes:
        given_up: whether it was killed because another rank had failed.
        ended_in: round of ``follow`` in which the end of the worker was noticed, or None.
    """

    def __init__(self, run_dir: RunDir, env: Mapping[str, str], command: Sequence[str], rank: int = 0) -> None:
        self.run_dir, self.rank, self.given_up = run_dir, rank, False
        self.ended_in: int | None = None
        self._log = run_dir.log_of(rank)
        self._reader = EventReader(run_dir.events(rank), size_of(run_dir.events(rank)))
        self._log_start = size_of(self._log)
        self._last: EndEvent | ErrorEvent | None = None
        self._killed = False
        LOG.debug("worker: %s", quoted(command))
        with open_in_place(self._log) as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=python_environment(env),
                **own_group(),
            )
        self.pid = self._child.pid
        self._job = JobObject.of(self.pid)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *details: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._job.close()

    def poll_ended(self, number: int) -> bool:
        """Return whether the worker is still running.

        If not, record that its end was noticed in round ``number`` of ``follow``.
        """
        if self._child.poll() is None:
            return True
        self.ended_in = number if self.ended_in is None else self.ended_in
        return False

    def has_failed(self) -> bool:
        """Whether the worker has ended without an ``end`` event."""
        return self._child.returncode is not None and not isinstance(self._last, EndEvent)

    def hand_on(self, on_event: OnEvent) -> None:
        """Call ``on_event`` with each new event of the worker."""
        for event in self._reader.poll():
            match event:
                case StartEvent():  # earlier events are the last ones of an orphan that this worker waited for
                    self._last = None
                case EndEvent():
                    self._last = event
                case ErrorEvent() if not isinstance(self._last, EndEvent):
                    self._last = event
            on_event(event)

    def stop(self, *, at_once: bool) -> None:
        """Ask the worker to finish its step and save, or kill it if ``at_once``.

        Raises:
            WorkerHungError: the worker cannot be killed.
        """
        if at_once:
            self._killed = True
            if not self.kill():
                raise unkillable(self.pid)
            return
        try:
            self.run_dir.ask_to_stop()
        except StorageError:  # it also saves and exits when its standard input ends
            assert self._child.stdin is not None
            self._child.stdin.close()

    def give_up(self) -> None:
        """Kill the worker because another rank, which it needs, has ended.

        Raises:
            WorkerHungError: the worker cannot be killed.
        """
        self.given_up = True
        if not self.kill():
            raise unkillable(self.pid)

    def kill(self) -> bool:
        """Kill the worker and everything that it started, including processes without a living parent.

        Return False if a driver blocks the worker, so that it cannot be killed.
        """
        if self._child.returncode is not None:  # its pid may have been reused, but not the id of its group
            kill_group(self.pid, self._job)
            return True
        gone = kill_tree(self.pid, self._job)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(KILL_WAIT_S if gone else 0)
        return self._child.returncode is not None

    def verdict(self) -> int:
        """Return the worker's exit code.

        Its last event (``end``, ``error``) takes precedence over the system's exit status.

        Raises:
            LoraRocmError: the error that the worker reported.
            StoppedError: the worker was killed at the second Ctrl-C.
            WorkerDiedError: the worker ended without a last event.
        """
        code = self._child.returncode
        return _verdict(
            self.run_dir, code, killed=self._killed, last=self._last, log_start=self._log_start, log=self._log
        )


def follow(
    workers: Sequence[Worker],
    asked: Asked,
    on_event: Callable[[int, Event], None],
    notify: Callable[[str], None],
    is_late: Callable[[], bool] = lambda: False,
) -> bool:
    """Pass on events with their rank until all workers have ended. Return True as soon as ``is_late`` reports a hang.

    ``is_late`` is called in every round. The first stop request asks the workers to finish their step and save; the
    second kills them. If one of several workers fails, the others have a moment to report their own errors before they
    are killed.
    """
    seen, failed_at, number = 0, None, 0
    while running := [worker for worker in workers if worker.poll_ended(number)]:
        number += 1
        for worker in workers:
            worker.hand_on(partial(on_event, worker.rank))
        # Stop requests
        if asked.level > seen:
            seen = asked.level
            first = seen == 1
            notify(STOPPING if first else "Ending the training process now.")
            for worker in workers:
                worker.stop(at_once=not first)
        # Hangs and failed ranks
        if is_late():
            return True
        if failed_at is None and any(worker.has_failed() for worker in workers):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > LAST_WORDS_S:
            for worker in running:
                worker.give_up()
        time.sleep(POLL_S)
    for worker in workers:
        worker.hand_on(partial(on_event, worker.rank))
    return False


def run_worker(
    run_dir: RunDir,
    env: Mapping[str, str],
    on_event: OnEvent,
    command: Sequence[str],
    notify: Callable[[str], None],
    asked: Asked | None = None,
    require_wanted: Callable[[], None] = lambda: None,
) -> int:
    """Start the worker without hang detection or restarts, pass on its events until it ends, and return its exit code.

    Args:
        run_dir: the run directory, prepared and locked.
        env: complete environment of the worker.
        on_event: function that is called in this thread with each event, including ``error`` and ``end``.
        command: program and arguments from ``worker_command``.
        notify: function that shows a message to the user.
        asked: requests to stop; None means Ctrl-C, SIGTERM and the closing of the terminal.
        require_wanted: is called regularly. If it raises a StoppedError, the worker is killed.

    Raises:
        LoraRocmError: an error as in ``Worker.verdict``.
    """

    def is_late() -> bool:
        require_wanted()
        return False

    run_dir.stop.unlink(missing_ok=True)  # writes: removes the link, where there is one
    listening = stop_signals() if asked is None else contextlib.nullcontext(asked)
    with listening as asked, Worker(run_dir, env, command) as worker:
        try:
            follow([worker], asked, lambda rank, event: on_event(event), notify, is_late)
        except StoppedError:
            worker.give_up()
            raise
        return worker.verdict()


def unkillable(pid: int, again: str = "") -> WorkerHungError:
    """Return the error for a worker that the system cannot kill. ``again``: command that resumes the run."""
    return WorkerHungError(
        "worker-unkillable",
        f"The training process (process {pid}) is blocked in a driver (most likely the GPU's, else a disk's or a "
        "network's), so not even the system can end it. Everything up to the last checkpoint is kept.",
        fix="Restart the machine; then continue with the same command and --resume latest"
        + (f":\n  {again}" if again else "."),
    )


def _verdict(
    run_dir: RunDir,
    returncode: int,
    *,
    killed: bool,
    last: EndEvent | ErrorEvent | None,
    log_start: int,
    log: Path | None = None,
) -> int:
    """Return the worker's exit code. Its last event (``end``, ``error``) takes precedence over the exit status."""
    if isinstance(last, EndEvent):  # a crash while the interpreter shuts down does not matter
        return last.exit_code
    if last is not None:
        raise with_fitting_fix(error_from_event(last), run_dir)
    if killed:
        raise StoppedError("killed", f"The run was killed without saving a checkpoint. {last_checkpoint_text(run_dir)}")
    run_dir.probe()  # a worker that cannot write cannot report it either
    log = run_dir.worker_log if log is None else log
    told = EventReader(log, max(log_start, size_of(log) - TAIL_BYTES), (ErrorEvent,)).poll()
    for event in reversed(told):
        if isinstance(event, ErrorEvent):  # from ``child_main``: the worker's own code was never reached
            raise with_fitting_fix(error_from_event(event), run_dir)
    advice = resume_advice(f"Run the same command with --resume latest. The whole log: {log}")
    raise with_fitting_fix(
        worker_died_error("The training process", returncode, tail_bytes(log, log_start), **advice), run_dir
    )


def with_fitting_fix(error: E, run_dir: RunDir) -> E:
    """Return the error. If the run has no checkpoint, its advice is replaced by the error's advice for that case."""
    if error.fix_without_checkpoint and not run_dir.list_checkpoints():
        error.fix = error.fix_without_checkpoint
    return error


def last_checkpoint_text(run_dir: RunDir) -> str:
    """Return a sentence about the newest checkpoint."""
    checkpoints = run_dir.list_checkpoints()
    return f"The last checkpoint is {checkpoints[-1][1].name}." if checkpoints else "There is no checkpoint yet."
