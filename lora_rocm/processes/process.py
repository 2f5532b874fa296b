"""Functions for child processes on every operating system: commands, stop requests, errors, and killing them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil

from lora_rocm.errors import LoraRocmError, MachineError, StoppedError, UserError
from lora_rocm.foundation.packages import require_packages
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.processes.child_main import LEAVE_WITH_PARENT
from lora_rocm.processes.windows_console import on_console_close
from lora_rocm.processes.windows_job import JobObject
from lora_rocm.rundir.event_types import ErrorEvent, Event

POLL_S = 0.1
KILL_WAIT_S = 10.0
KILL_POLL_S = 0.02
CHILD = "lora_rocm.processes.child_main"
BRANCHES: dict[int, type[LoraRocmError]] = {
    branch.exit_code: branch for branch in (UserError, MachineError, StoppedError)
}
OnEvent = Callable[[Event], None]


def heavy_command(module: str, *arguments: str, reads_input: bool = False) -> list[str]:
    """Return the command of a child process that imports torch. It starts in ``processes.child_main``.

    The child exits when its standard input closes. The caller has to keep this pipe open.

    Args:
        module: name of the module with the child's ``main``.
        arguments: the child's command-line arguments.
        reads_input: whether the module reads standard input itself. It then has to end by itself when the pipe closes.

    Raises:
        MachineError: a required package is not installed.
    """
    require_packages()
    watch = [] if reads_input else [LEAVE_WITH_PARENT]
    return python_command("-m", CHILD, *watch, module, *arguments)


@dataclass
class Asked:
    """Requests to stop that came from the user or the system.

    Attributes:
        count: number of times that the user pressed Ctrl-C.
        closing: whether SIGTERM arrived or the terminal closed. These are not counted, because a system may repeat them
            for one request: a shell and the kernel each send SIGHUP, and ``timeout`` sends SIGTERM twice.
    """

    count: int = 0
    closing: bool = False

    @property
    def level(self) -> int:
        """Level of the requests: 0 for none, 1 to finish the step, save and exit, 2 or more to exit at once."""
        return max(self.count, int(self.closing))


def error_from_event(event: ErrorEvent) -> LoraRocmError:
    """Return a child's error event as an exception with the same exit code."""
    branch = BRANCHES.get(event.exit_code, MachineError)
    return branch(
        event.code, event.what, where=event.where, fix=event.fix, fix_without_checkpoint=event.fix_without_checkpoint
    )


def kill_tree(pid: int, job: JobObject | None = None) -> bool:
    """Kill a process and all its descendants. Return whether the process itself is gone.

    The descendants are listed first, because they cannot be found after the process has ended. Descendants without
    a living parent are found by its process group, or by its job object on Windows. Processes that have already
    ended are ignored.
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


def kill_group(pid: int, job: JobObject | None) -> None:
    """Kill all processes in a child's process group, or in its job object on Windows."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # if the child leads no group, no group has its id
    if job is not None:
        job.terminate()


def _lives(process: psutil.Process) -> bool:
    """Whether a process is still running. A zombie is not; it is not reaped here, because Popen has to do that."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def stop_signals() -> Iterator[Asked]:
    """Yield a record of Ctrl-C, SIGTERM and the closing of the terminal. In this context they do not end the process.

    Signals are recorded in the main thread only. SIGHUP is not recorded if it is ignored, as under ``nohup``.
    """
    asked = Asked()

    def count(signum: int, frame: FrameType | None) -> None:
        asked.count += 1

    def close(signum: int = 0, frame: FrameType | None = None) -> None:
        asked.closing = True

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # Choose the handlers for this system
    wanted: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGINT: count}
    if sys.platform == "win32":
        wanted[signal.SIGBREAK] = count
    else:
        wanted[signal.SIGTERM] = close
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            wanted[signal.SIGHUP] = close
    # Install them, and restore the earlier ones at the end
    before = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
    try:
        with on_console_close(close):
            yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def own_group() -> dict[str, Any]:
    """Return Popen arguments that protect a child from Ctrl-C and the closing of the terminal.

    The parent handles both for its children.

    On Windows, closing a console ends all processes attached to it, regardless of their process group. So the child
    gets its own console, without a window.
    """
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"start_new_session": True}
