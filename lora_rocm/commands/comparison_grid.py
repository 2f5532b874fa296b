"""The grid of a run: pictures of its LoRA files by prompts and strengths, drawn by the child of ``lora-rocm compare``.

``grid/grid.json`` has only the user's wishes. Each picture's name is computed from everything that it depends
on, so a picture that exists is used, and one of a changed file is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_rocm.commands.compare import spread
from lora_rocm.commands.output import Notify, unheard
from lora_rocm.commands.sample_export import require_image_prompt, require_text, run_model_tool
from lora_rocm.errors import UserError, storage_error
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.files import make_folder, temporary_folder, write_atomic, write_json
from lora_rocm.foundation.json_text import object_in
from lora_rocm.processes.jobs import CompareJob
from lora_rocm.recipe.sample_section import PreviewPrompt, SampleSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.trigger import filled_in
from lora_rocm.rundir.event_types import ComparedEvent, Event
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.choose_run_dir import open_recipe

MAX_GRID_BYTES = 1 << 22
MAX_PROMPTS, MAX_STRENGTHS, MAX_FILES = 20, 10, 50
LARGEST_STRENGTH = 100.0
BASE = 0
"""The step of the base model without a LoRA."""
GRID_JSON = "grid.json"


@dataclass(frozen=True)
class GridRequest:
    """The user's wishes for a grid.

    Attributes:
        prompts: prompts of the pictures; empty for the recipe's.
        strengths: strengths of the LoRA.
        updates: steps of the LoRA files, oldest first.
    """

    prompts: tuple[str, ...]
    strengths: tuple[float, ...]
    updates: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """A place of the grid. path: its picture, which may not exist yet. A language model's is a text."""

    updates: int
    strength: float
    number: int
    path: Path

    @property
    def is_drawn(self) -> bool:
        return self.path.is_file()


@dataclass(frozen=True)
class Grid:
    """A grid with its places.

    Attributes:
        request: the user's wishes.
        prompts: the prompt of each picture of one file and strength.
        cells: all places: the base first, then each file with all strengths.
    """

    request: GridRequest
    prompts: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def missing(self) -> list[Cell]:
        """The places without a picture."""
        return [cell for cell in self.cells if not cell.is_drawn]

    def row(self, updates: int, strength: float) -> list[Cell]:
        """Return the places of a file and strength, in the order of the prompts."""
        return [cell for cell in self.cells if (cell.updates, cell.strength) == (updates, strength)]


def new_request(
    run_dir: RunDir, recipe: Recipe, prompts: Sequence[str], strengths: Sequence[float], most: int
) -> GridRequest:
    """Return a checked request.

    Args:
        run_dir: the run.
        recipe: its recipe.
        prompts: prompts, or the recipe's if empty.
        strengths: strengths, or the recipe's ``sample.lora_scale`` if empty.
        most: largest number of LoRA files, spread evenly over the run.

    Raises:
        UserError: nothing-to-compare: there is no prompt; no-lora-yet; grid-size; prompt-not-text, prompt-options.
    """
    for prompt in prompts:
        (require_text if recipe.spec.trains_on_texts else require_image_prompt)("prompt", prompt)
    if not prompts and not recipe.sample.prompts:
        what, fix = "The recipe of this run has no prompts.", "Write at least one prompt."
        raise UserError("nothing-to-compare", what, where=str(run_dir.recipe), fix=fix)
    files = spread(run_dir.checkpoint_loras(), most) if most > 0 else []
    if not run_dir.checkpoint_loras():
        what, fix = "This run has not written a LoRA file yet.", "Continue the training first."
        raise UserError("no-lora-yet", what, where=str(run_dir.path), fix=fix)
    given = tuple(sorted(set(strengths))) or (recipe.sample.lora_scale,)
    _require_size("prompts", len(prompts), MAX_PROMPTS, least=0)
    _require_size("strengths", len(given), MAX_STRENGTHS)
    _require_size("files", most, MAX_FILES)
    if not all(math.isfinite(each) and abs(each) <= LARGEST_STRENGTH for each in given):
        what = f"A strength has to be a number from {-LARGEST_STRENGTH:g} to {LARGEST_STRENGTH:g}."
        raise UserError("grid-size", what, where="strengths", fix="Usual strengths are 0.6 to 1.")
    own = recipe.sample.image_prompts
    asked = tuple(dict.fromkeys(filled_in("prompt", prompt, recipe) for prompt in prompts))
    same_as_own = bool(own) and list(asked) == list(dict.fromkeys(own))
    return GridRequest(() if same_as_own else asked, given, tuple(updates for updates, _ in files))


def _require_size(where: str, number: int, most: int, least: int = 1) -> None:
    if not least <= number <= most:
        what = f"The number of {where} has to be {least} to {most}."
        raise UserError("grid-size", what, where=where, fix="Change the number.")


def save_request(run_dir: RunDir, request: GridRequest) -> None:
    """Save the wishes for the grid.

    Raises:
        StorageError: it cannot be written.
    """
    _make_folder(run_dir)
    write_json(run_dir.grid / GRID_JSON, asdict(request), run_dir.path)


def read_request(run_dir: RunDir) -> GridRequest | None:
    """Return the saved wishes; None if there are none, or they cannot be read."""
    try:
        found = object_in(run_dir.grid / GRID_JSON, MAX_GRID_BYTES)
        request = GridRequest(
            tuple(str(each) for each in found["prompts"]),
            tuple(float(each) for each in found["strengths"]),
            tuple(int(each) for each in found["updates"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sizes = len(request.prompts) <= MAX_PROMPTS, len(request.strengths) <= MAX_STRENGTHS
    return request if all(sizes) and len(request.updates) <= MAX_FILES else None


def open_grid(
    source: Path, request: GridRequest | None = None, registry: FamilyRegistry = FAMILIES
) -> tuple[RunDir, Recipe, Grid | None]:
    """Return the run, its recipe, and the grid of a request: the saved one by default; None if there is none.

    Raises:
        UserError, RecipeError: see ``open_recipe``.
    """
    run_dir, recipe = open_recipe(source, registry)
    request = request or read_request(run_dir)
    return run_dir, recipe, None if request is None else grid_of(run_dir, recipe, request)


def grid_of(run_dir: RunDir, recipe: Recipe, request: GridRequest) -> Grid:
    """Return the grid of a request. Files that no longer exist have no places."""
    sample = _section(recipe, request)
    ending = "txt" if recipe.spec.preview == "text" else "png"
    versions = {BASE: "base"}
    for updates, path in run_dir.checkpoint_loras():
        if updates in request.updates:
            with contextlib.suppress(OSError):  # it was deleted meanwhile
                found = FileVersion.of(path)
                versions[updates] = f"{found.num_bytes}-{found.changed_ns}"
    pictures, each = list[tuple[PreviewPrompt, int]](), sample.images_per_prompt
    for number, (_, _, preview) in enumerate(sample.numbered()):
        first = sample.seed + number * each if preview.seed is None else preview.seed
        pictures += [(preview, first + image) for image in range(each)]
    cells = list[Cell]()
    for updates, version in versions.items():
        for strength in (1.0,) if updates == BASE else request.strengths:
            for number, (preview, seed) in enumerate(pictures):
                key = _key(version, strength, preview, seed)
                cells.append(Cell(updates, strength, number, run_dir.grid / f"{updates:08d}-{key}.{ending}"))
    kept = GridRequest(request.prompts, request.strengths, tuple(step for step in versions if step != BASE))
    return Grid(kept, tuple(preview.prompt for preview, _ in pictures), tuple(cells))


def draw_missing(
    run_dir: RunDir,
    recipe: Recipe,
    grid: Grid,
    notify: Notify = unheard,
    advance: Callable[[int, int], None] = lambda done, total: None,
    require_wanted: Callable[[], None] = lambda: None,
) -> int:
    """Draw the pictures that a grid lacks. Return their number. Each file's pictures are kept as soon as it is done.

    Args:
        run_dir: the run.
        recipe: its recipe.
        grid: the grid.
        notify: receives notices.
        advance: receives the number of files that are done, and of all.
        require_wanted: see ``run_model_tool``.

    Raises:
        StorageError: a picture cannot be written.
        LoraRocmError: the child process failed, or ``require_wanted`` raised it.
    """
    # The missing places; the base is drawn with any file, because the child always begins with it
    missing = grid.missing
    if not missing:
        return 0
    _make_folder(run_dir)
    steps = {cell.updates for cell in missing} - {BASE} or {*grid.request.updates[:1]}
    strengths = [each for each in grid.request.strengths if any(c.strength == each and c.updates for c in missing)]
    strengths = strengths or [*grid.request.strengths[:1]]
    files = tuple((updates, path) for updates, path in run_dir.checkpoint_loras() if updates in steps)
    num_done = [0]

    # Keep each file's pictures under their names
    def on_event(event: Event) -> None:
        if isinstance(event, ComparedEvent):
            shown = (1.0,) if event.updates == BASE else strengths
            cells = [cell for strength in shown for cell in grid.row(event.updates, strength)]
            for cell, path in zip(cells, event.images, strict=True):
                write_atomic(cell.path, Path(path).read_bytes(), run_dir.path)
            num_done[0] += 1
            advance(num_done[0], event.total)

    with temporary_folder() as folder:
        asked = grid.request.prompts  # all, because a prompt's seed depends on its place
        job = CompareJob(source=run_dir.path, prompts=asked, strengths=tuple(strengths), output=folder, files=files)
        advance(0, len(files) + 1)
        run_model_tool(job, on_event, notify, require_wanted)
    return len(missing) - len(grid.missing)


def _section(recipe: Recipe, request: GridRequest) -> SampleSection:
    return recipe.sample.only(request.prompts) if request.prompts else recipe.sample


def _key(version: str, strength: float, preview: PreviewPrompt, seed: int) -> str:
    """Return a name for everything that a picture depends on: file, strength, prompt with options, seed."""
    options: dict[str, Any] = preview.model_dump(mode="json", exclude={"lora_scale", "seed"})
    facts = json.dumps([version, strength, options, seed], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _make_folder(run_dir: RunDir) -> None:
    try:
        make_folder(run_dir.grid, run_dir.path)
    except OSError as error:
        raise storage_error(error, run_dir.grid) from error
