"""Chooses the data section with which a folder is read: a recipe's, or one with the values of the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from lora_rocm.dataset.sources.given import CROP_COLUMN
from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.recipe.load import load_recipe  # recipe: only read, for the page
from lora_rocm.recipe.schema import DataSection, Recipe, ResolvedSource
from lora_rocm.recipe.source_sections import DataSource

RESOLUTION = 1024
MAX_RECIPES = 200


@dataclass(frozen=True)
class FolderReading:
    """A folder and the data section with which it is read.

    Attributes:
        folder: the folder.
        data: a data section that has this folder as its only source.
        recipe: the recipe with this section; None if the values are chosen in the page.
    """

    folder: Path
    data: DataSection
    recipe: Path | None = None

    @property
    def options(self) -> ResolvedSource:
        """The options of the folder, at its first resolution."""
        return self.data.resolved_sources()[0]

    @property
    def crop_column(self) -> str:
        return self.options.crop_column or CROP_COLUMN


def reading_of(
    folder: Path, *, resolution: int = RESOLUTION, trigger_word: str = "", caption_extension: str = ".txt"
) -> FolderReading:
    """Return how a folder is read with these values, and the defaults of a recipe for all others.

    Raises:
        UserError: reading-invalid: a value cannot be used.
    """
    endings = tuple(caption_extension.split()) or (".txt",)
    try:
        data = DataSection(
            sources=(DataSource(path=str(folder)),),
            resolution=resolution,
            trigger_word=trigger_word.strip() or None,
            caption_extension=endings if len(endings) > 1 else endings[0],
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("one", "list"))
        fix = "Correct this value. The reference of recipe keys describes it."
        raise UserError(
            "reading-invalid", f"This value cannot be used: {first['msg']}.", where=where, fix=fix
        ) from error
    return FolderReading(folder, data)


def reading_by(recipe_path: Path, folder: Path) -> FolderReading:
    """Return how a recipe reads a folder.

    Raises:
        RecipeError: the recipe is wrong.
        UserError: recipe-other-folder: the folder is not a source of the recipe.
    """
    recipe = load_recipe(recipe_path).recipe
    index = next((index for index, path in enumerate(image_folders(recipe)) if path == folder), None)
    if index is None:
        fix = "Choose another recipe, or none."
        what = "This folder is not one of the recipe's sources of images."
        raise UserError("recipe-other-folder", what, where=str(recipe_path), fix=fix)
    sources = recipe.data.sources or (DataSource(path=recipe.data.path),)
    return FolderReading(
        folder, recipe.data.model_copy(update={"path": None, "sources": (sources[index],)}), recipe_path
    )


def image_folders(recipe: Recipe) -> list[Path | None]:
    """Return the folder of each source of a recipe; None for a source that is not a folder of images."""
    sources = recipe.data.sources or (DataSource(path=recipe.data.path),)
    if recipe.spec.trains_on_texts:
        return [None] * len(sources)
    return [Path(source.path).expanduser().resolve() if source.path else None for source in sources]


def recipes_in(folder: Path) -> list[tuple[Path, Recipe]]:
    """Return the recipes in a folder that can be read, by name. Other YAML files are skipped."""
    found = list[tuple[Path, Recipe]]()
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])[:MAX_RECIPES]:
        recipe = recipe_at(path)
        if recipe is not None:
            found.append((path, recipe))
    return found


def recipe_at(path: Path) -> Recipe | None:
    """Return the recipe in a file, read again only if the file has changed; None if it cannot be used."""
    try:
        return _recipe(FileVersion.of(path))
    except OSError:
        return None


@lru_cache(maxsize=2 * MAX_RECIPES)
def _recipe(version: FileVersion) -> Recipe | None:
    """Return a recipe, read again only if its file has changed; None if it is not a recipe, or a wrong one."""
    try:
        return load_recipe(version.path).recipe
    except LoraRocmError:
        return None
