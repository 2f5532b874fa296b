"""Renames, archives and deletes runs. Running runs are refused, and links are never followed.

An archived run is in the folder ``archive`` next to the other runs. If it is finished, its training states are deleted:
its results stay, and it can no longer be resumed. ``restore_run`` moves it back.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_rocm.errors import ResumeError, StorageError, UserError, storage_error
from lora_rocm.foundation.files import is_folder, make_folder, refuse_link, remove, rename, write_atomic
from lora_rocm.foundation.names import name_key, stem_fault
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.rundir.disk_space import bytes_in
from lora_rocm.rundir.fork_origin import ForkOrigin, fork_origin
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import OF_SYSTEM, RunDir
from lora_rocm.rundir.newest import is_run
from lora_rocm.rundir.remains import TEMPORARY, is_abandoned
from lora_rocm.rundir.results import faults_of_finished
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor.lock import locked

ARCHIVE = "archive"
"""Folder of archived runs, in the folder of the runs."""
MAX_NAMED = 5


@dataclass(frozen=True)
class RunChange:
    """A run that was renamed, archived or deleted, or would be.

    Attributes:
        action: renamed, archived, restored or deleted.
        run: the run directory before.
        now: the run directory now, or null if it was deleted.
        freed_bytes: disk space that was freed.
        is_done: whether it was done; false with `--dry-run`.
    """

    action: Literal["renamed", "archived", "restored", "deleted"]
    run: Path
    now: Path | None
    freed_bytes: int
    is_done: bool = True


def rename_run(run: Path, name: str, *, dry_run: bool = False) -> RunChange:
    """Rename a run directory. Forks in the same folder that name it are updated.

    Raises:
        UserError: there is no run, it is running, or the name is taken or invalid.
        StorageError: it cannot be renamed, or is a link.
    """
    run_dir = _require_idle(run)
    name = name_key(name)
    if fault := stem_fault(name) or _own_fault(name):
        raise UserError("run-name", f"This name {fault}.", where=legible(name), fix="Choose another name.")
    target = run_dir.path.with_name(name)
    if not dry_run:
        _move(run_dir, target)
        _update_forks(run_dir.path, target)
    return RunChange("renamed", run_dir.path, target, 0, not dry_run)


def _own_fault(name: str) -> str:
    if name.casefold() == ARCHIVE:
        return "is the name of the archive"
    return "" if legible(name) == name else "has invisible letters"


def archive_run(run: Path, *, dry_run: bool = False) -> RunChange:
    """Move a run to the archive. The training states of a finished run with intact results are deleted.

    Raises:
        UserError: there is no run, it is running, or the archive has a run with this name.
        StorageError: it cannot be moved, or is a link.
    """
    run_dir = _require_idle(run)
    target = run_dir.path.parent / ARCHIVE / run_dir.path.name
    has_states = _is_finished(run_dir) and is_folder(run_dir.checkpoints)
    states = [path for _, path in run_dir.list_checkpoints()] if has_states else []
    freed = sum(bytes_in(path) for path in states if is_folder(path))
    if not dry_run:
        try:
            make_folder(target.parent, run_dir.path.parent)
        except OSError as error:
            raise storage_error(error, target.parent) from error
        _move(run_dir, target)
        _update_forks(run_dir.path, target)
        for path in states:
            _remove(target / path.relative_to(run_dir.path))
    return RunChange("archived", run_dir.path, target, freed, not dry_run)


def restore_run(run: Path) -> RunChange:
    """Move a run from the archive back to the other runs.

    Raises:
        UserError: there is no run, it is not in an archive, or there is a run with this name.
        StorageError: it cannot be moved, or is a link.
    """
    run_dir = _require_idle(run)
    folder = run_dir.path.parent
    if folder.name != ARCHIVE:
        fix = "Only runs in the folder archive can be restored."
        raise UserError("run-not-archived", "This run is not archived.", where=str(run_dir.path), fix=fix)
    target = folder.parent / run_dir.path.name
    _move(run_dir, target)
    _update_forks(run_dir.path, target)
    return RunChange("restored", run_dir.path, target, 0)


def _is_finished(run_dir: RunDir) -> bool:
    """Whether a run is finished and its results are intact, so that no checkpoint is needed to write them again."""
    if not run_dir.result.exists() or faults_of_finished(run_dir):
        return False
    files = RunView.of(run_dir).files
    return not files.damaged and not files.stale and any(path != run_dir.report for path in files.whole)


def delete_run(run: Path, *, dry_run: bool = False) -> RunChange:
    """Delete a run directory. It is first renamed, so that a killed deletion leaves no half of a run.

    Raises:
        UserError: there is no run, it is running, or the folder also contains other files.
        StorageError: it cannot be deleted, or is a link.
    """
    run_dir = _require_idle(run)
    _require_only_run(run_dir)
    freed = bytes_in(run_dir.path)
    if not dry_run:
        temporary = run_dir.path.with_name(f".{run_dir.path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        _move(run_dir, temporary)
        _remove(temporary)
        for path in run_dir.path.parent.iterdir():  # of a deletion that was killed
            if (found := TEMPORARY.fullmatch(path.name)) and found[3] and is_folder(path) and is_abandoned(path.name):
                _remove(path)
    return RunChange("deleted", run_dir.path, None, freed, not dry_run)


def _require_idle(run: Path) -> RunDir:
    """Return the run, after checking that it is not a link and not running."""
    run_dir = RunDir(run.absolute())
    refuse_link(run_dir.path)
    if not is_run(run_dir.path):
        fix = "Use a run directory (runs/...)."
        raise UserError("no-run", "There is no run here.", where=str(run), fix=fix)
    if is_running(run_dir):
        raise _running(run_dir)
    return run_dir


def _running(run_dir: RunDir) -> UserError:
    fix = "Wait for its end, or stop it."
    return UserError("run-is-running", "This run is running.", where=str(run_dir.path), fix=fix)


def _require_only_run(run_dir: RunDir) -> None:
    """Refuse a folder that also contains files of the user.

    Raises:
        UserError: "run-has-other-files".
    """
    ours = re.compile(run_dir.patterns.of_run)
    names = sorted(os.listdir(run_dir.path))
    others = [
        name for name in names if not (ours.fullmatch(name) or TEMPORARY.fullmatch(name) or name.lower() in OF_SYSTEM)
    ]
    if others:
        shown = ", ".join(legible(name) for name in others[:MAX_NAMED])
        more = ", ..." if len(others) > MAX_NAMED else ""
        what = f"This folder has files that do not belong to the run: {shown}{more}."
        fix = "Move them away first. Nothing was deleted."
        raise UserError("run-has-other-files", what, where=str(run_dir.path), fix=fix)


@contextlib.contextmanager
def _reserved(run_dir: RunDir) -> Iterator[None]:
    """Have the run's lock within the context, so that it cannot start.

    On Windows the lock is released before: an open file prevents the renaming of its folder.
    """
    try:
        if os.name == "nt":
            with locked(run_dir):
                pass
            yield
        else:
            with locked(run_dir):
                yield
    except ResumeError:
        raise _running(run_dir) from None


def _move(run_dir: RunDir, target: Path) -> None:
    """Rename the run directory.

    Raises:
        UserError: "run-name-taken", there is something at the target.
        StorageError: it cannot be renamed.
    """
    if os.path.lexists(target):
        fix = "Choose another name, or move it away."
        raise UserError("run-name-taken", "There is already something at this path.", where=str(target), fix=fix)
    with _reserved(run_dir):
        try:
            rename(run_dir.path, target)
        except OSError as error:
            raise storage_error(error, run_dir.path) from error


def _remove(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        raise storage_error(error, path) from error


def _update_forks(before: Path, now: Path) -> None:
    """Update the parent's path in ``fork.json``: in its forks, and in the moved run itself if it is a fork."""
    own = fork_origin(RunDir(now))
    if own is not None:  # its relative path was resolved from the new place
        origin = ForkOrigin(_resolved_from(before, now, own.run), own.step, own.differences)
        write_atomic(RunDir(now).fork, origin.to_bytes(now), now)
    for folder in {before.parent, before.parent / ARCHIVE, now.parent}:
        for path in sorted(folder.iterdir()) if is_folder(folder) else []:
            origin_of = fork_origin(RunDir(path)) if is_folder(path) and path != now else None
            if origin_of is not None and origin_of.run == before:
                changed = ForkOrigin(now, origin_of.step, origin_of.differences)
                with contextlib.suppress(StorageError):  # the fork then names a run that is gone
                    write_atomic(RunDir(path).fork, changed.to_bytes(path), path)


def _resolved_from(before: Path, now: Path, run: Path) -> Path:
    """Return the path that a relative path meant before its folder moved from ``before`` to ``now``."""
    try:
        relative = os.path.relpath(run, now)
    except ValueError:  # Windows: on another drive, so it is absolute
        return run
    return Path(os.path.normpath(before / relative))
