"""Locks of a run directory, which allow one parent and one worker per rank.

The operating system frees a lock when the process that has it ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from lora_rocm.errors import ResumeError, storage_error
from lora_rocm.foundation.files import refuse_link
from lora_rocm.processes.process import POLL_S, kill_tree
from lora_rocm.rundir.event_types import StartEvent
from lora_rocm.rundir.events import read_events
from lora_rocm.rundir.heartbeat import read_heartbeat
from lora_rocm.rundir.held_locks import is_held
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.worker_process import WORKER, unkillable

LOCK_WAIT_S = 1.0  # `status` holds the lock for a moment
LEFTOVER_GRACE_S = 45.0  # after its parent died, a worker exits within 30 s (train.session), if it can


@contextlib.contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Lock the run directory against other parent processes within the context.

    Raises:
        ResumeError: another parent has the lock.
        StorageError: the lock file cannot be created.
    """
    refuse_link(run_dir.parent_lock)
    # writes: refuse_link comes before it; opened without following links, and nothing is written
    lock = FileLock(run_dir.parent_lock)
    try:
        lock.acquire(timeout=LOCK_WAIT_S)
    except Timeout:
        pid = last_worker_pid(run_dir)
        raise ResumeError(
            "run-dir-in-use",
            "Another lora-rocm process uses this run directory" + (f" (its worker is process {pid})." if pid else "."),
            where=str(run_dir.path),
            fix="Wait for it, stop it with Ctrl-C in its window, or choose another --run-dir.",
        ) from None
    except OSError as error:
        raise storage_error(error, run_dir.parent_lock) from error
    try:
        yield
    finally:
        lock.release()


def last_worker_pid(run_dir: RunDir, rank: int = 0) -> int | None:
    """Return the process id of the last started worker of this run, or None. The worker may have ended since."""
    starts = read_events(run_dir.events(rank), StartEvent)
    return starts[-1].pid if starts else None


def end_leftover(
    run_dir: RunDir, notify: Callable[[str], None], grace_s: float | None = None, worker: str | None = None
) -> None:
    """Wait for workers that a dead parent left running. Kill those that do not exit by themselves, as they may hang.

    Args:
        run_dir: the run directory, locked by this process.
        notify: function that shows a message to the user.
        grace_s: seconds to wait before a worker is killed; None means ``LEFTOVER_GRACE_S``.
        worker: module of the worker, as for ``worker_process.worker_command``.

    Raises:
        ResumeError: the directory is locked by another process, which is not known to be a worker of the run.
        WorkerHungError: a worker cannot be killed.
    """
    held = [(rank, path) for rank, path in run_dir.worker_locks() if is_held(path)]
    if held:
        notify("Waiting for the worker of an earlier start to save and exit ...")
    deadline = time.monotonic() + (LEFTOVER_GRACE_S if grace_s is None else grace_s)
    for rank, path in held:
        _end_holder(run_dir, rank, path, deadline, notify, worker or WORKER)


def _end_holder(
    run_dir: RunDir, rank: int, path: Path, deadline: float, notify: Callable[[str], None], worker: str
) -> None:
    while is_held(path) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if not is_held(path):
        return
    beat = read_heartbeat(run_dir.heartbeat(rank))
    for pid in {last_worker_pid(run_dir, rank), beat.pid if beat else None} - {None}:
        if pid is not None and _is_worker_of(run_dir, pid, worker):
            notify(f"The worker does not exit by itself, so it is killed (process {pid}).")
            if not kill_tree(pid):
                raise unkillable(pid)
            return
    raise ResumeError(
        "run-dir-in-use",
        "Another process has locked this directory, and it is not one of the run's workers.",
        where=str(path),
        fix="Wait for it, end it, or choose another --run-dir.",
    )


def _is_worker_of(run_dir: RunDir, pid: int, worker: str) -> bool:
    """Whether the process is a worker of this run.

    The process's command line is checked, because the pid of a dead worker may have been reused.
    """
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    place = run_dir.path.resolve()
    return any(word == worker and Path(folder).resolve() == place for word, folder in pairwise(words))
