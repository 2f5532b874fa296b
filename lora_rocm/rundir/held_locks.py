"""Checks whether processes hold the locks of a run directory, which ``supervisor.lock`` acquires."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from lora_rocm.foundation.files import is_link
from lora_rocm.rundir.layout import RunDir


def is_running(run_dir: RunDir) -> bool:
    """Whether a parent or a worker has locked this run directory."""
    return any(
        is_held(path) for path in (run_dir.parent_lock, *(path for _, path in run_dir.worker_locks())) if path.exists()
    )


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of this file."""
    if is_link(path):  # its target is not a lock of this run
        return False
    lock = FileLock(path)  # writes: refuse_link comes before it; opened without following links, and nothing is written
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:  # a read-only directory: the lock cannot be tried
        return False
    lock.release()
    return False
