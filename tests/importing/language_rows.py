"""Configurations of language-model trainers that set all keys of a table, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_rocm.importing.importer import ImportedRecipe, import_files
from lora_rocm.importing.rows import table_of
from lora_rocm.recipe.load import load_text
from tests.importing.imported import check_outcomes

VALUES: tuple[Any, ...] = (
    True, 0, "none", 0.25, None, 7, "a,b", False, ["q_proj"], "~/x.safetensors", 1, "2e-5", [], "dpo", -1, 1e30, "auto",
)  # fmt: skip
"""Values of many kinds: each key is given several of them, sensible or not."""
STEPS = (0, 3, 5, 7, 11)
OF_PEFT = ("peft_type", "task_type")
"""Keys that mark a file as PEFT's."""


def all_keys(trainer: str, step: int, base: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with every key of a trainer's table. ``step``: which value each key has."""
    keys = [key for row in table_of(trainer).row for key in row.keys]
    values = {key: VALUES[(number * 3 + step) % len(VALUES)] for number, key in enumerate(keys) if key not in OF_PEFT}
    return values | dict(base)


def check(path: Path, options: tuple[str, ...] = ()) -> ImportedRecipe:
    """Import a file: its recipe is valid, and each setting has one outcome."""
    found = import_files([path], options)
    load_text(found.text, Path("recipe"))
    check_outcomes([path], options)
    return found
