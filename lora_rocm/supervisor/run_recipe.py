"""Reads the recipe of a run, for commands that do not train it.

A run may come from another person. Its recipe therefore never decides where a command writes.
"""

from __future__ import annotations

from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.recipe.load import load_recipe  # recipe: this is the function that removes its folders
from lora_rocm.recipe.paths import with_default_outputs
from lora_rocm.recipe.schema import Recipe


def recipe_of_run(file: Path, registry: FamilyRegistry, spare_cache: Path | None = None) -> Recipe:
    """Read a run's ``recipe.yaml``, with its output folders replaced by the defaults in the current folder.

    Args:
        file: path of the recipe.
        registry: the model families.
        spare_cache: cache folder to use if neither the recipe's nor the current folder's contains a cache. None is for
            a process that opens no cache.

    Raises:
        UserError: run-without-recipe: the recipe is missing, or is not a file.
        RecipeError: the recipe is damaged.
    """
    if not file.is_file():
        raise UserError(
            "run-without-recipe",
            "The recipe of this run is missing, so its base model is unknown.",
            where=str(file),
            fix="Copy the recipe of the run to this path.",
        )
    from lora_rocm.cache_store.maintenance import holds_cache  # takes numpy, which `status` does without

    asked = load_recipe(file, registry=registry).recipe
    recipe = with_default_outputs(asked)
    if spare_cache is None:
        return recipe
    existing = (Path(asked.cache.dir), Path(recipe.cache.dir))
    folder = next(filter(holds_cache, existing), spare_cache)
    return recipe.model_copy(update={"cache": recipe.cache.model_copy(update={"dir": str(folder)})})
