"""Runs child processes that import torch and do a single job, and passes on their results.

The children write JSON to standard output: events (``rundir.events.emit``) or one object. They keep no state, and
end when this process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lora_rocm.errors import MachineError, WorkerDiedError
from lora_rocm.foundation.files import require_room, temporary_folder
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.processes import process
from lora_rocm.processes.job_file import MisfitError, from_json, write_job_file
from lora_rocm.processes.jobs import CHILDREN, RunJob, name_of, request_line
from lora_rocm.rundir.event_types import ErrorEvent, Event
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.exit_status import tail_bytes, worker_died_error

A = TypeVar("A")
LOG = logging.getLogger(__name__)
JSON_LIMIT_S = 3600.0
"""Time limit of a child that answers with one object. It usually takes seconds, or minutes with huge data."""


def run_tool(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    on_event: process.OnEvent,
    is_late: Callable[[], bool] = lambda: False,
) -> int:
    """Run a child process that writes events, one JSON object per line of standard output. Return its exit code.

    Ctrl-C, SIGTERM and the closing of the terminal end the child at once, because it has nothing to save.

    Raises:
        KeyboardInterrupt: one of these signals arrived.
        LoraRocmError: the child reported this error.
        StorageError: the disk has no room for the child's events.
        WorkerDiedError: the child failed without reporting an error, or ``is_late`` returned True.
    """
    code, log = follow_tool(process.heavy_command(module, *arguments), env, on_event, is_late)
    if code is None:
        raise WorkerDiedError(
            "worker-died",
            f"The process {module} did not answer, so it was killed.",
            fix="Run the command again; if it happens again, lora-rocm doctor lists known problems of this machine.",
        )
    if code:
        raise worker_died_error(f"The process {module}", code, log)
    return 0


def follow_tool(
    command: Sequence[str],
    env: Mapping[str, str],
    on_event: process.OnEvent,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[int | None, bytes]:
    """Run a child process that writes events until it ends. Return its exit code and the end of its standard error.

    ``is_late`` is called regularly. If it returns True, the child is killed, and the returned exit code is None.
    The child's standard input closes when this process ends.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or the closing of the terminal.
        LoraRocmError: the child reported this error.
    """
    problem: ErrorEvent | None = None
    ended = late = False
    with process.stop_signals() as asked, started(command, env) as tool:
        # Pass on its events until it ends or hangs
        while not ended and not late:
            if asked.count or asked.closing:
                raise KeyboardInterrupt
            ended, events = tool.poll()
            for event in events:
                if isinstance(event, ErrorEvent):
                    problem = event
                else:
                    on_event(event)
            late = not ended and is_late()
            time.sleep(0 if ended else process.POLL_S)
        code, log = tool.child.returncode, tail_bytes(tool.log, 0)
        if code and problem is None and not late:
            require_room(tool.log.parent)  # a child that cannot write its events reports nothing
    # Report
    if problem is not None:
        raise process.error_from_event(problem)
    return None if late else code, log


def write_job(folder: Path, job: object) -> Path:
    """Write a job file and return its path. ``folder`` has to exist as long as the child runs.

    Raises:
        StorageError: the file cannot be written.
    """
    if isinstance(job, RunJob):
        job = replace(job, spare_cache=folder / "cache")
    path = folder / "job.json"
    write_job_file(path, name_of(job), job)
    return path


def run_job(
    job: object, env: Mapping[str, str], on_event: process.OnEvent, require_wanted: Callable[[], None] = lambda: None
) -> int:
    """Run the child process of a job and return its exit code. See ``run_tool`` for errors.

    ``require_wanted`` is called regularly. If it raises an error, the child is killed, and the error is passed on.
    """

    def is_late() -> bool:
        require_wanted()
        return False

    with temporary_folder() as folder:
        return run_tool(CHILDREN[name_of(job)].module, [str(write_job(folder, job))], env, on_event, is_late)


def ask(
    job: object,
    answer: type[A],
    env: Mapping[str, str],
    on_event: process.OnEvent = lambda event: None,
    require_wanted: Callable[[], None] = lambda: None,
) -> A:
    """Run the child process of a job and return the object with which it answers.

    ``on_event`` and ``require_wanted``: see ``run_for_json``.

    Raises:
        LoraRocmError: see ``run_for_json``.
        MachineError: answer-unreadable.
    """
    child = CHILDREN[name_of(job)]
    assert child.answers[0] is answer
    with temporary_folder() as folder:
        found = run_for_json(child.module, [str(write_job(folder, job))], env, on_event, require_wanted)
    try:
        return from_json(answer, found)
    except MisfitError as error:
        what, fix = f"The answer of the process {child.module} cannot be read: {error}.", "Install lora-rocm again."
        raise MachineError("answer-unreadable", what, fix=fix) from error


@dataclass(frozen=True)
class Tool:
    """A running child process. log: file with its standard error. reader: reads its events."""

    child: subprocess.Popen[bytes]
    log: Path
    reader: EventReader

    def poll(self) -> tuple[bool, list[Event]]:
        """Return whether the process has ended, and its new events."""
        ended = self.child.poll() is not None
        return ended, self.reader.poll()

    def send(self, request: object) -> None:
        """Write a request (``Child.requests``) to the child's standard input.

        If the child has ended, nothing happens, and ``heard`` raises the error later.
        """
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError, OSError):  # Windows has OSError for a closed pipe
            self.child.stdin.write(request_line(request))
            self.child.stdin.flush()

    def heard(
        self, last: type[Event], count: int = 1, each_round: Callable[[], None] = lambda: None
    ) -> Iterator[Event]:
        """Yield the child's events, up to the ``count``-th event of the type ``last``.

        ``each_round`` is called regularly while waiting.

        Raises:
            LoraRocmError: the child reported this error.
            WorkerDiedError: the child ended too early.
        """
        while count > 0:
            each_round()
            ended, events = self.poll()
            for event in events:
                if isinstance(event, ErrorEvent):
                    raise process.error_from_event(event)
                yield event
                count -= isinstance(event, last)
            if ended and count > 0:
                require_room(self.log.parent)
                raise worker_died_error("The process", self.child.returncode, tail_bytes(self.log, 0))
            time.sleep(0 if count <= 0 else process.POLL_S)


@contextlib.contextmanager
def started(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Tool]:
    """Start and yield a child process with its output in files.

    It is killed at the end of the context if it still runs.
    """
    with temporary_folder() as folder:
        log, output = folder / "tool.log", folder / "events.jsonl"
        # writes: in its own folder among the system's temporary files
        with log.open("wb") as errors, output.open("wb") as events:
            LOG.debug("child process: %s", quoted(command))
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=events,
                stderr=errors,
                env=python_environment(env),
                **process.own_group(),
            )
            try:
                yield Tool(child, log, EventReader(output))
            finally:
                _end(child)


def _end(tool: subprocess.Popen[bytes]) -> None:
    """Kill a child if it is still running. A process that hangs inside a driver cannot be killed, and is abandoned."""
    if tool.poll() is None:
        process.kill_tree(tool.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tool.wait(process.KILL_WAIT_S)
    if tool.stdin is not None:
        tool.stdin.close()


def run_for_json(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    on_event: process.OnEvent = lambda event: None,
    require_wanted: Callable[[], None] = lambda: None,
    limit_s: float = JSON_LIMIT_S,
) -> dict[str, Any]:
    """Run a child process that writes one JSON object to standard output. Return this object.

    Args:
        module: module with the child's ``main``.
        arguments: its arguments.
        env: its environment.
        on_event: receives the events that the child writes before the object.
        require_wanted: is called regularly. If it raises an error, the child is killed, and the error is passed on.
        limit_s: time limit in seconds.

    Raises:
        LoraRocmError: the child reported this error, as an event or as text on standard error with a known exit code.
        WorkerDiedError: the child failed without reporting an error, or exceeded the time limit and was killed.
    """
    ended, latest_s = False, time.monotonic() + limit_s
    with started(process.heavy_command(module, *arguments), env) as tool:
        while not ended:
            require_wanted()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tool.child.wait(process.POLL_S)
            ended, events = tool.poll()
            for event in events:
                if not isinstance(event, ErrorEvent):
                    on_event(event)
            if not ended and time.monotonic() >= latest_s:
                raise WorkerDiedError(
                    "worker-died",
                    f"The process {module} was still running after {limit_s / 60:.0f} minutes, so it was killed.",
                    fix="Check the model's files and the data for the cause. Files on the network may be slow.",
                )
        code, output, errors = tool.child.returncode, tool.reader.path.read_bytes(), tool.log.read_bytes()
    # The result: an error event, the answer, an error text, or a death
    found = _last_object(output)
    if found is not None and found.get("type") == "error":
        raise process.error_from_event(ErrorEvent.read(found))
    if code == 0 and found is not None:
        return found
    said = errors.decode("utf-8", "replace").strip()
    if code in process.BRANCHES and said and "Traceback (most recent call" not in said:
        raise process.BRANCHES[code]("child-failed", said)
    with temporary_folder() as folder:
        require_room(folder)
    raise worker_died_error(f"The process {module}", code, errors)


def _last_object(output: bytes) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        try:
            value = json.loads(line)  # json: a job or an answer of another process of the same start
        except ValueError:  # something a library printed
            continue
        if isinstance(value, dict):
            return value
    return None
