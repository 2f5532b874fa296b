"""The queue as the page shows it. Everything follows from its files, locks and runs; nothing is stored."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.files import is_link, refuse_link
from lora_rocm.page_parts.texts import t
from lora_rocm.report.figures import RunProgress, progress_of
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor.queue_dir import DoneItem, QueueDir, QueueItem
from lora_rocm.ui.context import UiContext
from lora_rocm.ui.edits import MISSING, EditConflict, Edits, SavedEdit, version_of
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.run_list import newest_picture

if TYPE_CHECKING:
    from lora_rocm.commands.queue import QueuedRecipe

INTERRUPTED = ("died", "stopped")
"""States of a run that ``queue run`` continues."""
MAX_DONE = 20
DAY = "%Y-%m-%d %H:%M"
STOPPED_EXIT_CODES = (0, 130)


@dataclass(frozen=True)
class ShownItem:
    """A recipe in the queue.

    Attributes:
        recipe: the recipe with its state.
        key: a short text that identifies it in the page's markup.
        run: what requests call its run; None if it has not begun, or is in no named folder.
        version: the version of its file.
        is_fixed: whether it cannot be moved or removed, because it is being trained.
    """

    recipe: QueuedRecipe
    key: str
    run: str | None
    version: str
    is_fixed: bool

    @property
    def file_name(self) -> str:
        return self.recipe.file.name


@dataclass(frozen=True)
class ShownDone:
    """A finished recipe. run: what requests call its run, or None. picture: its newest preview. when: its end."""

    name: str
    run: str | None
    when: str
    updates: int | None
    loss: float | None
    picture: str | None


@dataclass(frozen=True)
class ShownNow:
    """The recipe that is being trained. run: what requests call its run, or None. step, speed and time left."""

    name: str
    run: str | None
    progress: RunProgress | None

    @property
    def share(self) -> float | None:
        """The part of its steps that is done, from 0 to 1; None if it is not known yet."""
        total = self.progress.max_train_steps if self.progress is not None else None
        return min(1.0, self.progress.updates / total) if self.progress is not None and total else None


@dataclass(frozen=True)
class QueueActivity:
    """The activity of a queue.

    Attributes:
        is_run: whether a process runs it.
        is_starting: whether its process was started here and does not run it yet.
        is_stopping: whether it was asked to stop and still runs.
        now: the recipe that is being trained, or None.
        interrupted: the recipe with which it continues after a stop, a kill or a power cut; None if there is none.
        num_left: number of recipes in it.
        output: the end of the output of a process that was started here and failed; otherwise empty.
    """

    is_run: bool
    is_starting: bool
    is_stopping: bool
    now: ShownNow | None
    interrupted: str | None
    num_left: int
    output: str


@dataclass(frozen=True)
class ShownQueue:
    """The recipes of a queue in order. version: of their order. num_more: finished ones that are not in ``done``."""

    items: Sequence[ShownItem]
    version: str
    done: Sequence[ShownDone]
    num_more: int


def activity_of_queue(ui: UiContext) -> QueueActivity:
    """Return the activity of the queue. Only the run that is being trained is read."""
    queue = QueueDir(ui.folders.queue)
    items, is_run = queue.items(), queue.is_run()
    launched = ui.launches.of(queue.path)
    active = next((item for item in items if queue.is_active(item.name)), None) if is_run else None
    states = [] if is_run else [(item.name, queue.state_of(item)[0]) for item in items if queue.run_of(item.name)]
    failed = launched is not None and not is_run and launched.exit_code not in (None, *STOPPED_EXIT_CODES)
    return QueueActivity(
        is_run,
        not is_run and launched is not None and launched.exit_code is None,
        is_run and queue.stop.exists(),
        _now(ui, queue, active) if active is not None else None,
        next((name for name, state in states if state in INTERRUPTED), None),
        len(items),
        launched.end_of_output if failed and launched is not None else "",
    )


def _now(ui: UiContext, queue: QueueDir, item: QueueItem) -> ShownNow:
    run, progress = queue.run_of(item.name), None
    if run is not None and is_run(run):
        with contextlib.suppress(LoraRocmError):  # its events cannot be read at the moment
            progress = progress_of(ui.views.of(RunDir(run)))
    return ShownNow(item.name, run_name(ui.folders, run), progress)


def shown_queue(ui: UiContext) -> ShownQueue:
    """Return the recipes of the queue in order, and the finished ones, the newest first."""
    from lora_rocm.commands.queue import listed

    queue = QueueDir(ui.folders.queue)
    found = listed(queue.path)
    names = [each.name for each in found.recipes]
    items = [_item(ui, queue, each, each.name in names[:index]) for index, each in enumerate(found.recipes)]
    done = queue.finished()[::-1]
    shown = [each for item in done[:MAX_DONE] if (each := _done(ui.folders, item)) is not None]
    return ShownQueue(
        items, version_of(_order(each.file for each in found.recipes)), shown, max(0, len(done) - MAX_DONE)
    )


def _item(ui: UiContext, queue: QueueDir, recipe: QueuedRecipe, is_repeated: bool) -> ShownItem:
    """is_repeated: whether an earlier recipe has the same name."""
    try:
        version = MISSING if is_link(recipe.file) else ui.edits.read(recipe.file)[1]
    except LoraRocmError:  # the row shows what is wrong with it
        version = MISSING
    named = recipe.file.name if is_repeated else recipe.name
    key = hashlib.sha256(named.encode("utf-8", "replace")).hexdigest()[:12]
    is_fixed = recipe.state == "running" or queue.is_active(recipe.name)
    return ShownItem(recipe, key, run_name(ui.folders, recipe.run), version, is_fixed)


def _done(folders: Folders, item: DoneItem) -> ShownDone | None:
    """Return a finished recipe; None if its file was removed meanwhile."""
    name, run = item.path.stem, run_name(folders, item.run)
    try:
        when = time.strftime(DAY, time.localtime(item.path.lstat().st_mtime))
    except OSError:
        return None
    if run is None or item.run is None:
        return ShownDone(name, None, when, None, None, None)
    run_dir = RunDir(item.run)
    try:
        view = RunView.of(run_dir, last_steps=400)
    except LoraRocmError:  # its own page shows why
        return ShownDone(name, run, when, None, None, None)
    if view.latest_s is not None:
        when = time.strftime(DAY, time.localtime(view.latest_s))
    return ShownDone(name, run, when, view.updates, progress_of(view).loss, newest_picture(run_dir))


def run_name(folders: Folders, run: Path | None) -> str | None:
    """Return what requests call a run; None if there is none at this path, or it is in no named folder."""
    if run is None:
        return None
    try:
        return folders.name_of(folders.run(str(run)).path)
    except UserError:
        return None


# Changes, each against the version that the page showed


def order_version(queue: QueueDir) -> str:
    """Return the version of the order of a queue's recipes."""
    return version_of(_order(item.path for item in queue.items()))


def _order(files: Iterable[Path]) -> bytes:
    return "\n".join(file.name for file in files).encode("utf-8", "surrogatepass")


def move(queue: QueueDir, file_name: str, place: Callable[[int, int], int], if_match: str) -> int:
    """Move a recipe, and return its new place from 1.

    Args:
        queue: the queue.
        file_name: the recipe's file name.
        place: computes the new place from the present one and the number of recipes.
        if_match: the version of the order that the page showed.

    Raises:
        EditConflict: the order has another version now.
        UserError: the recipe is being trained.
        StorageError: the queue cannot be written.
    """
    with queue.editing():
        before = _order(item.path for item in queue.items())
        if version_of(before) != if_match:
            mine = t("queue.wanted_move", file=file_name).encode("utf-8", "replace")
            raise EditConflict(queue.path, mine, before, version_of(before))
        item = queue.present(file_name)
        queue.require_idle(item)
        names = [each.path for each in queue.items()]
        wanted = min(max(place(names.index(item.path) + 1, len(names)), 1), len(names))
        if names[wanted - 1] != item.path:
            queue.move(item, wanted)
        return wanted


def remove(queue: QueueDir, edits: Edits, file_name: str, if_match: str) -> SavedEdit:
    """Remove a recipe so that ``undo_removal`` can restore it. Its run and the record of its run are kept.

    Raises:
        EditConflict: the file has another version now.
        UserError: there is no such recipe, or it is being trained.
        StorageError: the queue cannot be written.
    """
    with queue.editing():
        item = queue.present(file_name)
        queue.require_idle(item)
        refuse_link(item.path)
        return edits.save(item.path, None, if_match)


def undo_removal(queue: QueueDir, edits: Edits, file_name: str) -> SavedEdit:
    """Restore a recipe that was removed in the page. If its run had begun, the queue continues it.

    Raises:
        UserError: nothing of this name was removed.
        EditConflict: there is a file with this name again.
        StorageError: the queue cannot be written.
    """
    with queue.editing():
        return edits.undo(queue.path / Path(file_name).name, MISSING)
