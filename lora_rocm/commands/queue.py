"""``lora-rocm queue``: add, list, move and remove recipes that are trained one after another (``queue_run`` trains)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import RecipeError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.load import load_recipe  # recipe: the user names it
from lora_rocm.recipe.standalone_text import standalone_text
from lora_rocm.supervisor.queue_dir import QueueDir, QueueItem

READS = 5
"""A list of recipes is read this often at most, until nobody moves, adds or removes one meanwhile."""


@dataclass(frozen=True)
class QueuedRecipe:
    """One recipe in the queue.

    Attributes:
        place: its place in the order, from 1.
        name: its name, with which other commands identify it.
        file: the recipe file.
        state: waiting, unusable, or the state of its run as in `status`.
        run: its run directory, or null if it has not begun.
        updates: current step of its run, or null.
        max_train_steps: total number of steps, or null if not known yet.
        problem: why it failed or cannot be run, or null.
    """

    place: int
    name: str
    file: Path
    state: str
    run: Path | None = None
    updates: int | None = None
    max_train_steps: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class FinishedRecipe:
    """A finished recipe.

    Attributes:
        file: the recipe file.
        run: its run directory, or null if unknown.
    """

    file: Path
    run: Path | None


@dataclass(frozen=True)
class QueueResult:
    """The recipes in a queue.

    Attributes:
        folder: folder of the queue.
        is_run: whether `queue run` works on it now.
        recipes: the recipes in order.
        finished: the finished ones, the newest last.
        changed: names of the recipes that this command added, moved or removed.
    """

    folder: Path
    is_run: bool
    recipes: tuple[QueuedRecipe, ...]
    finished: tuple[FinishedRecipe, ...]
    changed: tuple[str, ...] = ()


def listed(folder: Path, registry: FamilyRegistry = FAMILIES, changed: Sequence[str] = ()) -> QueueResult:
    """Return the recipes of a queue and their states. Nothing is written; a missing folder is an empty queue.

    Raises:
        StorageError: the folder cannot be read.
    """
    queue = QueueDir(folder.absolute())
    items, recipes = queue.items(), tuple[QueuedRecipe, ...]()
    for _ in range(READS):
        recipes = tuple(_queued(queue, place, item, registry) for place, item in enumerate(items, 1))
        before, items = items, queue.items()
        if items == before:
            break
    finished = tuple(FinishedRecipe(each.path, each.run) for each in queue.finished())
    return QueueResult(queue.path, queue.is_run(), recipes, finished, tuple(changed))


def _queued(queue: QueueDir, place: int, item: QueueItem, registry: FamilyRegistry) -> QueuedRecipe:
    state, view = queue.state_of(item)
    problem = item.fault or None
    if state == "waiting":
        try:
            load_recipe(item.path, registry=registry)
        except RecipeError as error:
            state, problem = "unusable", f"{error.problems[0].where}: {error.problems[0].what}"
    if view is not None and view.problem is not None and state != "running":
        problem = view.problem.what
    run = queue.run_of(item.name)
    if view is None:
        return QueuedRecipe(place, item.name, item.path, state, run, problem=problem)
    return QueuedRecipe(place, item.name, item.path, state, run, view.updates, view.max_train_steps, problem)


def add(
    folder: Path, recipes: Sequence[str], overrides: Sequence[str] = (), registry: FamilyRegistry = FAMILIES
) -> QueueResult:
    """Copy recipes to the end of a queue. All are checked first; if one is wrong, none is added.

    Args:
        folder: folder of the queue, which is created.
        recipes: paths of recipes, or names of shipped ones.
        overrides: ``section.key=value`` settings of all of them.
        registry: the available families.

    Raises:
        RecipeError: a recipe is wrong, or names a file that does not exist.
        UserError: another process changes the queue.
        StorageError: the queue cannot be written.
    """
    texts = []
    for each in recipes:
        loaded = load_recipe(each, overrides, registry)
        loaded.require_files()
        texts.append((loaded.name, standalone_text(loaded)))
    queue = QueueDir(folder.absolute())
    with queue.editing():
        added = [queue.add(name, text).name for name, text in texts]
    return listed(folder, registry, added)


def remove(folder: Path, names: Sequence[str]) -> QueueResult:
    """Remove recipes from a queue. Their runs are kept.

    Raises:
        UserError: there is no such recipe, not any longer, or it is being trained. Nothing is removed then.
        StorageError: the queue cannot be written.
    """
    queue = QueueDir(folder.absolute())
    found = [queue.find(name) for name in names]
    with queue.editing():
        found = [queue.present(item.path.name) for item in found]  # it may have changed before the lock
        for item in found:
            queue.require_idle(item)
        for item in found:
            queue.remove(item)
    return listed(folder, changed=[item.name for item in found])


def move(folder: Path, name: str, place: int) -> QueueResult:
    """Move a recipe to a place in the order, from 1.

    Raises:
        UserError: there is no such recipe, or it is being trained.
        StorageError: the queue cannot be written.
    """
    queue = QueueDir(folder.absolute())
    item = queue.find(name)
    with queue.editing():
        item = queue.present(item.path.name)  # it may have changed before the lock
        queue.require_idle(item)
        queue.move(item, place)
    return listed(folder, changed=[item.name])


def render(result: QueueResult) -> str:
    """Return a queue as text."""
    lines = []
    for each in result.recipes:
        step = "" if each.updates is None else f", step {each.updates}"
        of = f" of {each.max_train_steps}" if each.updates is not None and each.max_train_steps else ""
        lines.append(f"{each.place:>3}  {legible(each.name)}: {each.state}{step}{of}")
        lines += [f"     {each.run}"] if each.run is not None else []
        lines += [f"     {each.problem}"] if each.problem else []
    if not result.recipes:
        lines.append(f"The queue {result.folder} is empty. Add recipes with: lora-rocm queue add RECIPE")
    if result.finished:
        lines.append(f"{count_text(len(result.finished), 'recipe')} finished: {result.folder / 'done'}")
    if result.recipes:
        lines.append("It is being run." if result.is_run else "Start it with: lora-rocm queue run")
    return "\n".join(lines)
