"""The files of a queue: recipes in an order, and the runs that they began.

``NNN-NAME.yaml`` is a recipe that waits. Its number is its place in the order, and its name identifies it. Users may
add, edit, rename and remove these files themselves. No state is stored. ``started/NAME.json`` names the run directory
of a recipe, before the run begins. The state follows from this run, and from locks. A finished recipe is moved to
``done``, with the run that it made.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from lora_rocm.errors import LoraRocmError, UserError, storage_error
from lora_rocm.foundation.files import (
    file_exists,
    is_link,
    make_folder,
    open_in_place,
    refuse_link,
    remove,
    rename,
    write_json,
    write_new,
)
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.names import name_key, stem_fault, usable_stem
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.rundir.held_locks import is_held, is_running
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run
from lora_rocm.rundir.run_view import RunView, State

ITEM = re.compile(r"(?:(\d{1,9})-)?(.+)\.(?:yaml|yml)", re.IGNORECASE)
STEP = 10
"""Difference of the numbers of two recipes that are added one after the other, so that there is room in between."""
MAX_NUMBER = 10**9 - 1
MAX_ITEMS = 10_000
MAX_RECORD_BYTES = 1 << 16
EDIT_WAIT_S = 10.0
ItemState = Literal["waiting", "unusable", "unreadable"] | State


@dataclass(frozen=True)
class QueueItem:
    """One recipe in the queue.

    number: place in the order; None for a file without a number, which comes last.
    name: identifies it.
    fault: why it cannot be run, as a sentence; empty if it can.
    """

    path: Path
    number: int | None
    name: str
    fault: str = ""

    @property
    def order(self) -> tuple[float, str]:
        return (float("inf") if self.number is None else self.number, self.path.name)


@dataclass(frozen=True)
class DoneItem:
    """A finished recipe.

    Attributes:
        path: its file.
        run: its run directory, or None if its record is lost.
        queued_as: the file name that it had in the queue; empty if its record is lost or from an earlier version.
    """

    path: Path
    run: Path | None
    queued_as: str = ""


@dataclass(frozen=True)
class QueueDir:
    """The paths and files of one queue."""

    path: Path

    @property
    def done(self) -> Path:
        return self.path / "done"

    @property
    def started(self) -> Path:
        return self.path / "started"

    @property
    def stop(self) -> Path:
        """A file that asks ``queue run`` to end: the current run finishes its step and saves."""
        return self.path / "stop"

    @property
    def run_lock(self) -> Path:
        return self.path / ".queue.lock"

    @property
    def edit_lock(self) -> Path:
        return self.path / ".edit.lock"

    def record_of(self, name: str) -> Path:
        return self.started / f"{name}.json"

    def lock_of(self, name: str) -> Path:
        return self.started / f".{name}.lock"

    # Reading

    def items(self) -> list[QueueItem]:
        """Return the recipes in order. Of two with the same name, only the first can be run.

        Raises:
            StorageError: the folder cannot be read.
        """
        try:
            names = os.listdir(self.path)[:MAX_ITEMS] if self.path.is_dir() else []
        except OSError as error:
            raise storage_error(error, self.path) from error
        matches = ((name, ITEM.fullmatch(name)) for name in names if not name.startswith("."))
        found = [
            QueueItem(self.path / name, int(match[1]) if match[1] else None, name_key(match[2]))
            for name, match in matches
            if match
        ]
        seen, items = set[str](), []
        for item in sorted(found, key=lambda each: each.order):
            key = item.name.casefold()
            items.append(QueueItem(item.path, item.number, item.name, self._fault(item, key in seen)))
            seen.add(key)
        return items

    def _fault(self, item: QueueItem, is_taken: bool) -> str:
        mode = _mode(item.path)
        if is_link(item.path) or not stat.S_ISREG(mode):
            return "This is not a regular file. A queue has copies of recipes, and no links."
        if fault := stem_fault(item.name):
            return f"The name of this file {fault}."
        return "An earlier recipe of the queue has the same name. Rename one of the two." if is_taken else ""

    def run_of(self, name: str) -> Path | None:
        """Return the run directory in which a recipe began, or None."""
        return _run_in(self.record_of(name))

    def is_active(self, name: str) -> bool:
        """Whether ``queue run`` works on a recipe now."""
        lock = self.lock_of(name)
        return os.path.lexists(lock) and is_held(lock)

    def is_run(self) -> bool:
        """Whether a process runs this queue now."""
        return os.path.lexists(self.run_lock) and is_held(self.run_lock)

    def state_of(self, item: QueueItem) -> tuple[ItemState, RunView | None]:
        """Return the state of a recipe, and its run if there is one."""
        run = self.run_of(item.name)
        if item.fault:
            return "unusable", None
        try:
            view = RunView.of(RunDir(run), last_steps=1) if run is not None and is_run(run) else None
        except LoraRocmError:
            return "unreadable", None
        if self.is_active(item.name):
            return "running", view
        return "waiting" if view is None else view.state, view

    def finished(self) -> list[DoneItem]:
        """Return the finished recipes, the oldest first."""
        if not self.done.is_dir() or is_link(self.done):
            return []
        files = [path for path in self.done.iterdir() if ITEM.fullmatch(path.name) and stat.S_ISREG(_mode(path))]
        return [_done(path) for path in sorted(files, key=_changed_s)]

    def find(self, text: str) -> QueueItem:
        """Return the recipe that a user names: by its name, its file name, or its number.

        Raises:
            UserError: there is none, or the number is not unique.
        """
        items = self.items()
        found = [item for item in items if text in (item.name, item.path.name, item.path.stem)]
        if not found and text.isascii() and text.isdigit():
            found = [item for item in items if item.number == int(text[:9] or 0) and len(text) < 10]
        if len(found) == 1:
            return found[0]
        names = ", ".join(legible(item.path.name) for item in (found or items)[:10])
        what = "Several recipes have this number." if found else "There is no such recipe in the queue."
        fix = f"Recipes: {names}." if names else f"The queue is empty: {self.path}."
        raise UserError("queue-no-item", what, where=legible(text), fix=fix)

    def present(self, file_name: str) -> QueueItem:
        """Return the recipe with a file name that the queue had when a user or a page read it.

        Raises:
            UserError: "queue-item-gone". The message names the reason: trained, moved or removed.
        """
        items = self.items()
        item = next((each for each in items if each.path.name == file_name), None)
        if item is not None:
            return item
        match = ITEM.fullmatch(file_name)
        moved = next((each for each in items if match is not None and each.name == name_key(match[2])), None)
        done = next((each for each in reversed(self.finished()) if each.queued_as == file_name), None)
        what, fix = "This recipe has been removed from the queue by now.", "Add it again to train it."
        if moved is not None:
            what, fix = "This recipe has been moved by now.", f"Its file is now {legible(moved.path.name)}."
        elif done is not None:
            what, fix = (
                "This recipe has been trained by now.",
                f"Its run: {done.run}. Add the recipe to train it again.",
            )
        raise UserError("queue-item-gone", what, where=legible(file_name), fix=fix)

    def current(self, item: QueueItem) -> QueueItem:
        """Return a recipe with the file name that it has now: it may have been moved since it was listed.

        Raises:
            UserError: "queue-item-gone". The message names the reason.
        """
        items = self.items()
        same_file = (each for each in items if each.path == item.path)
        same_name = (each for each in items if each.name == item.name and not each.fault)
        found = next(same_file, None) or next(same_name, None)
        return found or self.present(item.path.name)

    def current_of(self, file_name: str) -> QueueItem:
        """Return the recipe that had a file name when a user or a page read it, with the name that it has now.

        Raises:
            UserError: "queue-item-gone". The message names the reason.
        """
        match = ITEM.fullmatch(file_name)
        return self.current(QueueItem(self.path / file_name, None, name_key(match[2]) if match else ""))

    def ask_to_stop(self) -> None:
        """Create the file ``stop``.

        Raises:
            StorageError: it cannot be created.
        """
        open_in_place(self.stop).close()

    # Changing; the caller has the lock of ``editing``

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Lock the order and the files of the queue for a moment. The queue is created.

        Raises:
            UserError: another process changes it for too long.
            StorageError: it cannot be written, or a part is a link.
        """
        try:
            make_folder(self.path)
            for folder in (self.started, self.done):
                make_folder(folder, self.path)
        except OSError as error:
            raise storage_error(error, self.path) from error
        with locked(self.edit_lock, EDIT_WAIT_S, "Another process is changing this queue.", "queue-busy"):
            yield

    def add(self, name: str, text: str) -> QueueItem:
        """Add a recipe at the end."""
        items = self.items()
        taken = {item.name.casefold() for item in items}
        stem = usable_stem(name)
        unique = next(each for each in _numbered(stem) if each.casefold() not in taken)
        number = max((item.number or 0 for item in items), default=0)
        number = (number // STEP + 1) * STEP
        path = self.path / f"{number:03}-{unique}.yaml"
        with contextlib.suppress(OSError):
            remove(self.record_of(unique))  # of a recipe that was removed by hand
        write_new(path, text.encode("utf-8"))
        return QueueItem(path, number, unique)

    def require_idle(self, item: QueueItem) -> None:
        """Refuse to change a recipe that is being trained.

        Raises:
            UserError: "queue-item-running".
        """
        run = self.run_of(item.name)
        if self.is_active(item.name) or (run is not None and is_running(RunDir(run))):
            fix = "Stop it first: Ctrl-C in the window of queue run, or create the file stop in its run directory."
            raise UserError("queue-item-running", "This recipe is being trained.", where=str(item.path), fix=fix)

    def remove(self, item: QueueItem) -> None:
        """Remove a recipe from the queue. Its run directory is kept."""
        try:
            remove(item.path)
            remove(self.record_of(item.name))
        except OSError as error:
            raise storage_error(error, item.path) from error

    def move(self, item: QueueItem, place: int) -> list[QueueItem]:
        """Move a recipe to a place in the order, from 1, and return the new order.

        Only its number changes if there is room between its new neighbours; otherwise all numbers do.
        """
        others = [each for each in self.items() if each.path != item.path]
        place = min(max(place, 1), len(others) + 1)
        # Room between its neighbours
        before = others[place - 2].number if place > 1 else 0
        after = others[place - 1].number if place <= len(others) else (before or 0) + 2 * STEP
        if before is not None and after is not None and after - before > 1:
            self._renumber(item, (before + after) // 2)
            return self.items()
        # No room: new numbers above all old ones, the last first, so that a kill leaves the old or the new order
        order = [*others[: place - 1], item, *others[place - 1 :]]
        highest = max((each.number or 0 for each in order), default=0)
        for index, each in reversed(list(enumerate(order, 1))):
            self._renumber(each, (highest // STEP + index) * STEP)
        return self.items()

    def _renumber(self, item: QueueItem, number: int) -> None:
        target = self.path / f"{number:03}-{item.name}{item.path.suffix}"
        if target == item.path:
            return
        if os.path.lexists(target) or number > MAX_NUMBER:
            raise file_exists(target)
        try:
            rename(item.path, target)
        except OSError as error:
            raise storage_error(error, item.path) from error

    def begin(self, name: str, run: Path) -> None:
        """Record the run directory of a recipe, before its run begins."""
        write_json(self.record_of(name), {"run": str(run)}, self.path)

    def finish(self, name: str, run: Path) -> DoneItem | None:
        """Move a finished recipe to ``done``; None if its file was removed by hand meanwhile.

        The order of the steps lets a killed process repeat them.
        """
        item = next((each for each in self.items() if each.name == name), None)
        stem = next(each for each in _numbered(run.name) if not os.path.lexists(self.done / f"{each}.yaml"))
        target = self.done / f"{stem}.yaml"
        try:
            if item is not None:
                record = {"run": str(run), "queued_as": item.path.name}
                write_json(target.with_suffix(".json"), record, self.path)
                rename(item.path, target)
            remove(self.record_of(name))
            with contextlib.suppress(OSError):  # Windows: this process has it open
                remove(self.lock_of(name))
        except OSError as error:
            raise storage_error(error, self.done) from error
        return DoneItem(target, run, item.path.name) if item is not None else None


@contextlib.contextmanager
def locked(path: Path, wait_s: float, what: str, code: str) -> Iterator[None]:
    """Have a lock within the context.

    Raises:
        UserError: with this code and text, another process has the lock.
        StorageError: it cannot be created, or is a link.
    """
    refuse_link(path)
    lock = FileLock(path)  # writes: refuse_link comes before it; opened without following links, and nothing is written
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        fix = "Wait for it, or use another queue with --queue-dir."
        raise UserError(code, what, where=str(path.parent), fix=fix) from None
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        yield
    finally:
        lock.release()


def _done(path: Path) -> DoneItem:
    record = path.with_suffix(".json")
    name = object_in(record, MAX_RECORD_BYTES).get("queued_as") if not is_link(record) else None
    return DoneItem(path, _run_in(record), name if isinstance(name, str) else "")


def _run_in(record: Path) -> Path | None:
    """Return the run directory in a record; None if it is missing or damaged."""
    run = object_in(record, MAX_RECORD_BYTES).get("run") if not is_link(record) else None
    return Path(run) if isinstance(run, str) and run and "\0" not in run and os.path.isabs(run) else None


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _changed_s(path: Path) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
