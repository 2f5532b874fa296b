"""Processes: the one module that calls what differs between operating systems."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from lora_rocm.errors import (
    LoraRocmError,
    MachineError,
    StoppedError,
    UserError,
    WorkerDiedError,
    WorkerHungError,
)
from lora_rocm.run.events import EventReader
from lora_rocm.run.job import Job
from lora_rocm.run.layout import RunDir

POLL_S = 0.1
KILL_WAIT_S = 10.0
KILL_POLL_S = 0.02
WORKER = "lora_rocm.train.worker"
TAIL_LINES = 8
TAIL_COLUMNS = 300
TAIL_BYTES = 16384
BRANCHES: dict[int, type[LoraRocmError]] = {
    branch.exit_code: branch for branch in (UserError, MachineError, StoppedError)
}
# Codes that Windows gives a process that crashed (NTSTATUS values, ntstatus.h).
NTSTATUS = {0xC0000005: "access violation", 0xC00000FD: "stack overflow", 0xC0000409: "fail-fast or stack overrun"}

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


def worker_command(
    run_dir: RunDir,
    checkpoint: Path | None = None,
    accept_changes: bool = False,
    attempt: int = 0,
    stacks_after_s: Mapping[str, float] | None = None,
) -> list[str]:
    """The training child. Without ``checkpoint`` it goes on from the newest valid one."""
    command = [sys.executable, "-m", WORKER, str(run_dir.path)]
    command += ["--checkpoint", str(checkpoint)] if checkpoint else []
    command += ["--accept-changes"] if accept_changes else []
    command += ["--attempt", str(attempt)] if attempt else []
    return command + (["--stacks-after", json.dumps(stacks_after_s)] if stacks_after_s is not None else [])


@dataclass
class Asked:
    """How often the user asked to stop."""

    count: int = 0


class Worker:
    """A training child that runs: in a process group of its own (a job object on Windows), and ended as a whole.

    When this process ends for whatever reason, the worker sees the end of its standard input and leaves by itself.

    Args:
        run_dir: a prepared and locked run directory.
        env: the worker's whole environment.
        command: program and arguments, see ``worker_command``.
    """

    def __init__(self, run_dir: RunDir, env: Mapping[str, str], command: Sequence[str]) -> None:
        self.run_dir = run_dir
        self._reader = EventReader(run_dir.events(), size_of(run_dir.events()))
        self._log_start = size_of(run_dir.worker_log)
        self._last: dict[str, Event] = {}
        self._killed = False
        with run_dir.worker_log.open("ab") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=dict(env), **own_group()
            )
        self.pid = self._child.pid
        self._job = Job.of(self.pid)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *details: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._job.close()

    def follow(
        self, asked: Asked, on_event: OnEvent, say: Callable[[str], None], is_late: Callable[[], bool] = lambda: False
    ) -> bool:
        """Hand on its events until it has ended. True: ``is_late``, asked all the time, said that it hangs.

        The first time that the user asks to stop, the worker is asked to finish its step and save; the second time it
        is killed.
        """
        seen = 0
        while self._child.poll() is None:
            self._hand_on(on_event)
            if asked.count > seen:
                seen = asked.count
                self._stop_or_kill(seen, say)
            if is_late():
                return True
            time.sleep(POLL_S)
        self._hand_on(on_event)
        return False

    def _hand_on(self, on_event: OnEvent) -> None:
        for event in self._reader.poll():
            if event["type"] == "start":
                self._last.clear()  # what came before is the farewell of an orphan that this worker waited for
            self._last[event["type"]] = event
            on_event(event)

    def _stop_or_kill(self, count: int, say: Callable[[str], None]) -> None:
        if count == 1:
            try:
                self.run_dir.stop.touch()
            except OSError:  # it saves and leaves too when it believes that this process has ended
                assert self._child.stdin is not None
                self._child.stdin.close()
            say("Finishing the step and saving; Ctrl-C again ends it now (the last checkpoint is kept).")
        else:
            say("Ending it now.")
            self._killed = True
            if not self.kill():
                raise unkillable(self.pid)

    def kill(self) -> bool:
        """End it and everything that it started, also what was left behind by a child that is gone.

        False: it cannot be ended; a driver holds it.
        """
        if self._child.returncode is not None:  # its number may be another's by now, but not that of its group
            kill_group(self.pid, self._job)
            return True
        gone = kill_tree(self.pid, self._job)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(KILL_WAIT_S if gone else 0)
        return self._child.returncode is not None

    def verdict(self) -> int:
        """What its end means: its exit code. Its own word (``end``, ``error``) counts before that of the system.

        Raises:
            LoraRocmError: the error that it met, with its exit code.
            StoppedError: it was killed by the second Ctrl-C.
            WorkerDiedError: it ended without a word.
        """
        code = self._child.returncode
        return _verdict(self.run_dir, code, killed=self._killed, last=self._last, log_start=self._log_start)


def run_worker(
    run_dir: RunDir, env: Mapping[str, str], on_event: OnEvent, command: Sequence[str], say: Callable[[str], None]
) -> int:
    """Start the worker, hand on its events until it ends, and return its exit code; nobody watches it.

    Args:
        run_dir: a prepared and locked run directory.
        env: the worker's whole environment.
        on_event: called in this thread with each event, also with ``error`` and ``end``.
        command: program and arguments, see ``worker_command``.
        say: shows a sentence to the user.

    Raises:
        LoraRocmError: see ``Worker.verdict``.
    """
    run_dir.stop.unlink(missing_ok=True)
    with stop_signals() as asked, Worker(run_dir, env, command) as worker:
        worker.follow(asked, on_event, say)
        return worker.verdict()


def unkillable(pid: int, again: str = "") -> WorkerHungError:
    """The error for a worker that the system cannot end."""
    return WorkerHungError(
        "worker-unkillable",
        f"The training process (process {pid}) is held by a driver (most likely the GPU's, else that of a disk or a "
        "network), and not even the system can end it. Everything up to the last checkpoint is kept.",
        fix="Restart the machine; then go on with the same command and --resume latest"
        + (f":\n  {again}" if again else "."),
    )


def _verdict(run_dir: RunDir, returncode: int, *, killed: bool, last: Mapping[str, Event], log_start: int) -> int:
    """What the end of the worker means. Its own word (``end``, ``error``) counts before the exit code."""
    if "end" in last:  # a crash while the interpreter shuts down takes nothing back
        return int(last["end"]["exit_code"])
    if "error" in last:
        raise error_from_event(last["error"])
    if killed:
        raise StoppedError("killed", f"Ended at once. {last_checkpoint_text(run_dir)}")
    run_dir.probe()  # a worker that cannot write cannot say so either
    fix = f"The last checkpoint is kept: run again with --resume latest. The whole log: {run_dir.worker_log}"
    raise died("The training process", returncode, tail_bytes(run_dir.worker_log, log_start), fix)


def last_checkpoint_text(run_dir: RunDir) -> str:
    """A sentence about the newest checkpoint."""
    checkpoints = run_dir.list_checkpoints()
    return f"The last checkpoint is {checkpoints[-1][1].name}." if checkpoints else "There is no checkpoint yet."


def error_from_event(event: Event) -> LoraRocmError:
    """A child's error as one of ours, with the same exit code."""
    branch = BRANCHES.get(event["exit_code"], MachineError)
    return branch(event["code"], event["what"], where=event["where"], fix=event["fix"])


def died(who: str, returncode: int, log: bytes, fix: str = "") -> WorkerDiedError:
    """The error for a child that ended without a word of its own; ``log`` is the end of what it wrote."""
    what = f"{who} ended without saying why: {describe_exit(returncode)}."
    if returncode in (-9, 137):
        what += " The system does this when memory (RAM) runs out."
    tail = _last_lines(log)
    if tail:
        what += "\nThe end of its log:\n" + "\n".join(f"    {line}" for line in tail)
    return WorkerDiedError("worker-died", what, fix=fix)


def describe_exit(returncode: int) -> str:
    """A return code in words: signal names, Windows' crash codes."""
    if returncode < 0:
        try:
            return f"killed by signal {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    code = returncode & 0xFFFFFFFF
    if code >= 0xC0000000:
        return f"crashed with code 0x{code:08X}" + (f" ({NTSTATUS[code]})" if code in NTSTATUS else "")
    return f"exit code {returncode}"


def tail_bytes(log: Path, start: int) -> bytes:
    """The end of what was written to ``log`` after ``start``."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, size_of(log) - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _last_lines(log: bytes) -> list[str]:
    """The last lines, printable; of a traceback only its last line (the rest stays in the log)."""
    lines = log[-TAIL_BYTES:].decode("utf-8", "replace").splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")), len(lines))
    kept = lines[:first] + ([lines[-1]] if first < len(lines) else [])
    return [
        "".join(letter if letter.isprintable() else " " for letter in line[:TAIL_COLUMNS])
        for line in kept[-TAIL_LINES:]
    ]


def kill_tree(pid: int, job: Job | None = None) -> bool:
    """Kill a process and everything it started; processes that are gone already are fine.

    True: the process itself is gone. Its children are looked for first: once it has ended, nobody knows whose they
    were, but for its process group (its job on Windows), which has those whose own parent ended before.
    """
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    kill_group(pid, job)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + KILL_WAIT_S
    while (alive := [process for process in family if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(KILL_POLL_S)
    return all(process.pid != pid for process in alive)


def kill_group(pid: int, job: Job | None) -> None:
    """End what is left of the process group (the job, on Windows) that a child began."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # where the child leads no group, there is none with its number
    if job is not None:
        job.terminate()


def _lives(process: psutil.Process) -> bool:
    """Not where only its parent still has to hear of its end (that is not asked for here: Popen wants to hear it)."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def stop_signals() -> Iterator[Asked]:
    """Count Ctrl-C and SIGTERM (Ctrl-Break on Windows) instead of dying of them. Only the main thread can."""
    asked = Asked()

    def count(signum: int, frame: FrameType | None) -> None:
        asked.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    if sys.platform == "win32":
        wanted = [signal.SIGINT, signal.SIGBREAK]
    else:
        wanted = [signal.SIGINT, signal.SIGTERM]
    before = {signum: signal.signal(signum, count) for signum in wanted}
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def own_group() -> dict[str, Any]:
    """Popen arguments that keep Ctrl-C from reaching the child: the parent decides what it means."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none that can be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
