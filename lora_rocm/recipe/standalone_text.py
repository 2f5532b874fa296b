"""Writes a loaded recipe as a text that has the same meaning in another folder: paths are absolute, --set is included.

Comments and order of the recipe file are kept if possible. Otherwise the whole recipe with all defaults is written.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lora_rocm.errors import RecipeError
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.recipe.layers import EITHER_OR
from lora_rocm.recipe.load import LoadedRecipe, dump_recipe, load_text
from lora_rocm.recipe.paths import every_path
from lora_rocm.recipe.value_edit import with_comments
from lora_rocm.recipe.yaml_tree import Key, YamlSyntaxError, value_at


def standalone_text(loaded: LoadedRecipe) -> str:
    """Return the text of a recipe that ``load_recipe`` reads as the same recipe in any folder.

    Output folders are written even if they are defaults, because they depend on the current folder.
    """
    head = f"# Copied from {legible(str(loaded.path))}\n"
    text = _with_comments(loaded)
    return head + (text if text is not None else dump_recipe(loaded.recipe))


def _with_comments(loaded: LoadedRecipe) -> str | None:
    """Return the recipe file's own text with absolute paths and --set; None if it would be read as another recipe."""
    yaml = YAML()  # keeps comments, order and quotes
    yaml.width = 4096
    try:
        data = with_comments(loaded.layers.texts[str(loaded.path)])
        if not isinstance(data, dict) or "base" in data:
            return None
        for key, value in _changes(loaded):
            _set(data, key, value)
        stream = io.StringIO()
        yaml.dump(data, stream)
        found = load_text(stream.getvalue(), loaded.path, registry=loaded.registry)
    except (YAMLError, YamlSyntaxError, RecipeError, LookupError, TypeError, ValueError):
        return None
    return stream.getvalue() if found.recipe == loaded.recipe and not _relative(found) else None


def _changes(loaded: LoadedRecipe) -> Iterator[tuple[Key, object]]:
    """Yield (key, value) for each value of --set and each path. A value of None removes the key."""
    layers = loaded.layers
    for key, place in layers.places.items():
        if len(key) == 2 and place.origin == "--set":
            yield key, value_at(layers.data, key)
            if (other := EITHER_OR.get(key)) is not None:
                yield other, None
    for key, path, rule in every_path(loaded.recipe):
        if value_at(layers.data, key) is not None or rule.is_output:
            yield key, path


def _set(data: dict[str, object], key: Key, value: object) -> None:
    """Set a value at a key, unless it is the same text. None removes the key. A missing section is added."""
    section = value_at(data, key[:-1])
    if section is None and len(key) == 2:
        section = data[str(key[0])] = {}
    if value is None:
        section.pop(key[-1], None)
    elif value_at(section, key[-1:]) != value or not isinstance(value, str):
        section[key[-1]] = value


def _relative(found: LoadedRecipe) -> bool:
    """Whether a path in the text is not the recipe's path itself, so that it depends on the folder."""
    return any(
        value_at(found.layers.data, key) != path
        for key, path, _ in every_path(found.recipe)
        if value_at(found.layers.data, key) is not None
    )
