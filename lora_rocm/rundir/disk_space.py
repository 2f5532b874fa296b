"""Compares needed bytes with free disk space, before the disk is full."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from lora_rocm.errors import StorageError, storage_error
from lora_rocm.foundation.units import size_text

RESERVE_BYTES = 1 << 20
"""Bytes to keep free in addition to the files to be written: for events and the error report."""

Free = Callable[[Path], "int | None"]


def free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write to the disk of ``path``, which may not exist yet.

    None if the file system does not report it (some network drives report a size of 0). Quotas of a user or a folder
    are not considered: if one is used up, writing fails as on a full disk.

    Raises:
        StorageError: the disk does not respond.
    """
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        raise storage_error(error, path) from error
    return usage.free if usage.total else None


def require(path: Path, needed_bytes: int, what: str, fix: str, free: Free = free_bytes) -> None:
    """Check that there is enough space for a write.

    Raises:
        StorageError: "disk-low", there is too little.
    """
    found = free(path)
    if found is not None and found < needed_bytes + RESERVE_BYTES:
        raise StorageError(
            "disk-low",
            f"There is not enough space on the disk for {what}: {size_text(needed_bytes)} needed, "
            f"{size_text(found)} free. Nothing was written.",
            where=str(path),
            fix=fix,
        )


def shortage(path: Path, needed_bytes: int, what: str, free: Free = free_bytes) -> str:
    """Return a warning if the disk will be full before everything is written; otherwise an empty string."""
    found = free(path)
    if found is None or found >= needed_bytes + RESERVE_BYTES:
        return ""
    return (
        f"The disk may be full before the end: {what} need about {size_text(needed_bytes)}, "
        f"and {size_text(found)} are free at {path}."
    )


def bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder; links are not followed, and unreadable files count as 0."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # removed meanwhile, or no permission
            continue
    return total
