"""Processes and locks: the one module that calls what differs between operating systems."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
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
from filelock import FileLock, Timeout

from lora_rocm.errors import (
    LoraRocmError,
    MachineError,
    ResumeError,
    StoppedError,
    UserError,
    WorkerDiedError,
    storage_error,
)
from lora_rocm.run.events import EventReader, read_events
from lora_rocm.run.layout import RunDir

POLL_S = 0.1
LOCK_WAIT_S = 1.0  # `status` tries the lock for a moment
KILL_WAIT_S = 10.0
TAIL_LINES = 8
TAIL_COLUMNS = 300
TAIL_BYTES = 16384
FULL_BYTES = 65536  # a worker that finds less than this free could not even say that the disk is full
BRANCHES: dict[int, type[LoraRocmError]] = {
    branch.exit_code: branch for branch in (UserError, MachineError, StoppedError)
}
# Codes that Windows gives a process that crashed (NTSTATUS values, ntstatus.h).
NTSTATUS = {0xC0000005: "access violation", 0xC00000FD: "stack overflow", 0xC0000409: "fail-fast or stack overrun"}

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


@contextlib.contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Hold the run directory against another parent.

    Raises:
        ResumeError: another one holds it.
        StorageError: the lock file cannot be made.
    """
    lock = FileLock(run_dir.parent_lock)
    try:
        lock.acquire(timeout=LOCK_WAIT_S)
    except Timeout:
        pid = last_worker_pid(run_dir)
        raise ResumeError(
            "run-dir-in-use",
            "Another lora-rocm is running in this directory" + (f" (its worker is process {pid})." if pid else "."),
            where=str(run_dir.path),
            fix="Wait for it, stop it with Ctrl-C in its window, or give another --run-dir.",
        ) from None
    except OSError as error:
        raise storage_error(error, run_dir.parent_lock) from error
    try:
        yield
    finally:
        lock.release()


def is_running(run_dir: RunDir) -> bool:
    """Whether a parent or a worker holds this run directory."""
    return any(_is_held(path) for path in (run_dir.parent_lock, run_dir.worker_lock) if path.exists())


def _is_held(path: Path) -> bool:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:  # a directory that we may only read: nobody's lock can be tried there
        return False
    lock.release()
    return False


def last_worker_pid(run_dir: RunDir) -> int | None:
    """Process id of the newest worker of this run, dead or alive."""
    starts = [event for event in read_events(run_dir.events()) if event["type"] == "start"]
    return starts[-1]["pid"] if starts else None


def worker_command(run_dir: RunDir, checkpoint: Path | None = None, accept_changes: bool = False) -> list[str]:
    """The training child. Without ``checkpoint`` it goes on from the newest valid one."""
    command = [sys.executable, "-m", "lora_rocm.train.worker", str(run_dir.path)]
    command += ["--checkpoint", str(checkpoint)] if checkpoint else []
    return command + (["--accept-changes"] if accept_changes else [])


def run_worker(
    run_dir: RunDir, env: Mapping[str, str], on_event: OnEvent, command: Sequence[str], say: Callable[[str], None]
) -> int:
    """Start the worker, hand on its events until it ends, and return its exit code.

    Ctrl-C (or SIGTERM) asks it to finish its step and save; the second one kills it. When this process ends for
    whatever reason, the worker sees the end of its standard input and leaves by itself.

    Args:
        run_dir: a prepared and locked run directory.
        env: the worker's whole environment.
        on_event: called in this thread with each event, also with ``error`` and ``end``.
        command: program and arguments, see ``worker_command``.
        say: shows a sentence to the user.

    Raises:
        LoraRocmError: the error that the worker met, with its exit code.
        StoppedError: it was killed by the second Ctrl-C.
        WorkerDiedError: it ended without a word.
    """
    run_dir.stop.unlink(missing_ok=True)
    reader = EventReader(run_dir.events(), _size(run_dir.events()))
    log_start = _size(run_dir.worker_log)
    last: dict[str, Event] = {}

    def drain() -> None:
        for event in reader.poll():
            if event["type"] == "start":
                last.clear()  # what came before is the farewell of an orphan that this worker waited for
            last[event["type"]] = event
            on_event(event)

    with _stop_signals() as asked, run_dir.worker_log.open("ab") as log:
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=dict(env), **own_group()
        )
        assert worker.stdin is not None
        try:
            seen = 0
            while worker.poll() is None:
                drain()
                if asked.count > seen:
                    seen = asked.count
                    _stop_or_kill(run_dir, worker, asked.count, say)
                time.sleep(POLL_S)
            drain()
        finally:
            worker.stdin.close()
    return _verdict(run_dir, worker.returncode, killed=asked.count > 1, last=last, log_start=log_start)


def _stop_or_kill(run_dir: RunDir, worker: subprocess.Popen[bytes], count: int, say: Callable[[str], None]) -> None:
    if count == 1:
        run_dir.stop.touch()
        say("Finishing the step and saving; Ctrl-C again ends it now (the last checkpoint is kept).")
    else:
        say("Ending it now.")
        kill_tree(worker.pid)


def _verdict(run_dir: RunDir, returncode: int, *, killed: bool, last: Mapping[str, Event], log_start: int) -> int:
    """What the end of the worker means. Its own word (``end``, ``error``) counts before the exit code."""
    if "end" in last:  # a crash while the interpreter shuts down takes nothing back
        return int(last["end"]["exit_code"])
    if "error" in last:
        raise error_from_event(last["error"])
    if killed:
        checkpoints = run_dir.list_checkpoints()
        kept = f"The last checkpoint is {checkpoints[-1][1].name}." if checkpoints else "There is no checkpoint yet."
        raise StoppedError("killed", f"Ended at once. {kept}")
    if shutil.disk_usage(run_dir.path).free < FULL_BYTES:
        raise storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), run_dir.path)
    fix = f"The last checkpoint is kept: run again with --resume latest. The whole log: {run_dir.worker_log}"
    raise died("The training process", returncode, tail_bytes(run_dir.worker_log, log_start), fix)


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
            file.seek(max(start, _size(log) - TAIL_BYTES))
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


def kill_tree(pid: int) -> None:
    """Kill a process and everything it started; processes that are gone already are fine."""
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_WAIT_S)


@dataclass
class _Asked:
    """How often the user asked to stop."""

    count: int = 0


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Asked]:
    """Count Ctrl-C and SIGTERM (Ctrl-Break on Windows) instead of dying of them. Only the main thread can."""
    asked = _Asked()

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


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
