"""Renames, archives and deletes run directories. A run that a process has locked is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lora_rocm.errors import ResumeError, UserError, storage_error
from lora_rocm.foundation.files import make_folder, remove, rename
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import RunDir

ARCHIVE = "archived"
"""Folder next to the runs for those that lists do not show."""
FORBIDDEN = frozenset('<>:"/\\|?*')


def rename_run(run_dir: RunDir, name: str) -> RunDir:
    """Rename a run directory. Its files keep their names.

    Args:
        run_dir: the run.
        name: the new name of the directory.

    Raises:
        UserError: run-name: no directory can have this name on every system; file-exists: the name is in use.
        ResumeError: run-dir-in-use: the run is running.
        StorageError: the directory cannot be renamed.
    """
    if not _is_portable(name):
        fix = 'Use letters, digits, spaces and the characters - _ . ( ), and none of < > : " / \\ | ? *.'
        raise UserError("run-name", "No folder can have this name on every system.", where=name[:200], fix=fix)
    return _moved(run_dir, run_dir.path.with_name(name))


def archive_run(run_dir: RunDir) -> RunDir:
    """Move a run directory into the folder ARCHIVE next to it, or back from there.

    Raises:
        UserError: file-exists: there is a run with this name.
        ResumeError: run-dir-in-use: the run is running.
        StorageError: the directory cannot be moved.
    """
    folder = run_dir.path.parent
    target = folder.parent if folder.name == ARCHIVE else folder / ARCHIVE
    try:
        make_folder(target)
    except OSError as error:
        raise storage_error(error, target) from error
    return _moved(run_dir, target / run_dir.path.name)


def delete_run(run_dir: RunDir) -> None:
    """Delete a run directory with all its files. Links in it are removed, but not their targets.

    Raises:
        ResumeError: run-dir-in-use: the run is running.
        StorageError: a file cannot be deleted. Files that were deleted before it are gone.
    """
    with _not_running(run_dir):
        # first under another name, so that a run that is deleted in part is never taken for a whole one
        aside = run_dir.path.with_name(f".{run_dir.path.name}.deleted.{os.getpid()}.tmp")
        try:
            rename(run_dir.path, aside)
            remove(aside)
        except OSError as error:
            raise storage_error(error, run_dir.path) from error


def disk_bytes(folder: Path) -> int:
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


def _moved(run_dir: RunDir, target: Path) -> RunDir:
    with _not_running(run_dir):
        if os.path.lexists(target):
            fix = "Choose another name, or move the other one away."
            raise UserError("file-exists", "There is something with this name already.", where=str(target), fix=fix)
        try:
            rename(run_dir.path, target)
        except OSError as error:
            raise storage_error(error, run_dir.path) from error
    return RunDir(target)


@contextlib.contextmanager
def _not_running(run_dir: RunDir) -> Iterator[None]:
    """Check that no process works in the directory. A lock cannot be held meanwhile: Windows moves no open file."""
    if is_running(run_dir):
        fix = "Stop the run, and try again when it has ended."
        raise ResumeError("run-dir-in-use", "A lora-rocm process works in it.", where=str(run_dir.path), fix=fix)
    yield


def _is_portable(name: str) -> bool:
    """Whether a folder on Windows, Linux and macOS can have this name."""
    reserved = {"con", "prn", "aux", "nul", *(f"{device}{number}" for device in ("com", "lpt") for number in range(10))}
    letters = name.isprintable() and not FORBIDDEN & set(name) and 0 < len(name.encode("utf-8", "replace")) <= 200
    return letters and name == name.strip(" .") and name.partition(".")[0].lower() not in reserved and name != ARCHIVE
