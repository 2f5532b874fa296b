"""The recipes in the folders that the user named, the newest first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.names import name_key
from lora_rocm.rundir.run_name import MAX_RECIPE_BYTES
from lora_rocm.ui.folders import Folders

SUFFIXES = (".yaml", ".yml")
SUBFOLDER = "recipes"
BEGINNINGS = ("model:", "base:")
"""A recipe has a line that begins with one of these. Other YAML files are not listed."""
MAX_LISTED = 500


@dataclass(frozen=True)
class ShownRecipe:
    """A recipe in a list.

    Attributes:
        name: what requests call it.
        family: its model family.
        purpose: the first sentence of its first comment; may be empty.
        written_s: when it was written, in seconds since the epoch.
    """

    name: str
    family: str
    purpose: str
    written_s: float


def named_file(name: str) -> str:
    """Return the file name for a recipe's name: with .yaml, if it has no suffix of YAML."""
    name = name_key(name.strip())
    return name if name.lower().endswith(SUFFIXES) else f"{name}{SUFFIXES[0]}"


def recipe_path(folders: Folders, name: str) -> Path:
    """Return the path of the recipe that a request names. It may not exist.

    Raises:
        UserError: outside-folders; or recipe-suffix: it is not a YAML file, so the page neither shows nor changes it.
    """
    path = folders.resolve(name)
    if path.suffix.lower() not in SUFFIXES:
        fix = f"End the name in {SUFFIXES[0]}."
        raise UserError("recipe-suffix", "A recipe has to be a YAML file.", where=str(path), fix=fix)
    return path


def listed_recipes(folders: Folders) -> list[ShownRecipe]:
    """Return the recipes directly in the named folders, and in a folder "recipes" in one of them."""
    found = {each.name: each for path in _yaml_files(folders) if (each := _shown(path, folders)) is not None}
    return sorted(found.values(), key=lambda recipe: recipe.written_s, reverse=True)[:MAX_LISTED]


def has_recipes(folders: Folders) -> bool:
    """Whether ``listed_recipes`` is not empty, as far as this can be known without the schema of recipes."""
    for path in _yaml_files(folders):
        with contextlib.suppress(OSError, UserError, UnicodeDecodeError):
            lines = read_plain(folders.resolve(str(path)), MAX_RECIPE_BYTES).decode("utf-8-sig").splitlines()
            if any(line.startswith(BEGINNINGS) for line in lines):
                return True
    return False


def _yaml_files(folders: Folders) -> Iterator[Path]:
    for named in folders.named:
        if named.reason == "runs":
            continue
        for folder in (named.path, named.path / SUBFOLDER):
            with contextlib.suppress(OSError):
                yield from (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _shown(path: Path, folders: Folders) -> ShownRecipe | None:
    """Return a recipe; None for another file, or one that cannot be read or is elsewhere in truth."""
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.recipe.shipped import described

    try:
        real = folders.resolve(str(path))
        text = read_plain(real, MAX_RECIPE_BYTES).decode("utf-8-sig")
        written_s = real.stat().st_mtime
    except (OSError, UserError, UnicodeDecodeError):
        return None
    if not any(line.startswith(BEGINNINGS) for line in text.splitlines()):
        return None
    about = described(real, text, FAMILIES.names[0])
    return ShownRecipe(folders.name_of(real), about.family, about.purpose, written_s)
