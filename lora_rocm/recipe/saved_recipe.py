"""Describe faults of the recipe in a run directory. Used by commands that only show the run."""

from __future__ import annotations

import os

from lora_rocm.errors import RecipeError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.bounded_read import check_plain
from lora_rocm.recipe.load import MAX_RECIPE_BYTES, load_recipe  # recipe: only read; nothing is written here
from lora_rocm.rundir.layout import RunDir


def recipe_fault(run_dir: RunDir, registry: FamilyRegistry = FAMILIES) -> str:
    """Return why a run's ``recipe.yaml`` cannot be used, and how to fix it, as sentences; empty if it can be used."""
    try:
        if not os.path.lexists(run_dir.recipe):
            fault = "no longer exists"
        elif not run_dir.holds(run_dir.recipe):
            fault = "is a link to a place outside the run"
        else:
            check_plain(run_dir.recipe, MAX_RECIPE_BYTES)
            load_recipe(run_dir.recipe, registry=registry)
            return ""
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except RecipeError as error:
        fault = f"cannot be read: {error.problems[0].where}: {error.problems[0].what}"
    return f"{run_dir.recipe} {fault}. Copy the recipe of this run there: chat, sample, compare and export need it."
