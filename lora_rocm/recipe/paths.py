"""Process the paths of a recipe: make them absolute, set defaults, list them, or remove them from the recipe.

``sections.path_rule`` marks the fields that are paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from lora_rocm.foundation.names import BUILTIN, spelled
from lora_rocm.recipe.sections import PathRule, path_rule
from lora_rocm.recipe.yaml_tree import Key

AnySection = TypeVar("AnySection", bound=BaseModel)


@cache
def path_rules(section: type[BaseModel]) -> Mapping[str, PathRule | None]:
    """Return the path rule of each field of a section, by name; None for fields that are not paths."""
    return {name: path_rule(info) for name, info in section.model_fields.items()}


def made_absolute(value: str, rule: PathRule) -> str:
    """Return the absolute path. Hub ids and built-in names stay unchanged if the rule allows them."""
    if value in rule.words:
        return value
    path = str(spelled(Path(os.path.abspath(os.path.expanduser(value)))))
    if rule.absolute == "always":
        return path
    return value if value.startswith(BUILTIN) or (rule.absolute == "if there" and not os.path.exists(path)) else path


def with_absolute_paths(section: AnySection) -> AnySection:
    """Return the section with absolute paths. The worker and a later resume may run in other folders."""

    def absolute(value: Any, default: Any, rule: PathRule) -> Any:
        if isinstance(value, tuple):
            return tuple(made_absolute(path, rule) for path in value)
        return None if value is None else made_absolute(value, rule)

    return _with_paths(section, absolute)


def with_default_outputs(section: AnySection) -> AnySection:
    """Return the section with every output folder at its default, relative to the current folder."""
    return _with_paths(section, lambda _, default, rule: made_absolute(default, rule) if rule.is_output else None)


def _with_paths(section: AnySection, new: Callable[[Any, Any, PathRule], Any]) -> AnySection:
    """Return the section with paths replaced at any depth.

    Args:
        section: the section.
        new: takes a path, its default and its rule. Returns the new path, or None to keep the old one.
    """
    changed: dict[str, Any] = {}
    for name, rule in path_rules(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            changed[name] = _with_paths(value, new)
        elif rule is not None:
            if (path := new(value, type(section).model_fields[name].default, rule)) is not None:
                changed[name] = path
        elif isinstance(value, tuple):
            changed[name] = tuple(_with_paths(v, new) if isinstance(v, BaseModel) else v for v in value)
    return section.model_copy(update=changed)


def settings_without_paths(section: BaseModel) -> dict[str, object]:
    """Return the values of a recipe or section as JSON values, without paths of this machine. Hub ids are kept."""
    found: dict[str, object] = {}
    for name, rule in path_rules(type(section)).items():
        value, is_path = getattr(section, name), rule is not None
        items = value if isinstance(value, tuple) else (value,)
        kept = [
            settings_without_paths(item) if isinstance(item, BaseModel) else item
            for item in items
            if not (is_path and isinstance(item, str) and os.path.isabs(item))
        ]
        if isinstance(value, tuple):
            found[name] = kept
        elif kept:
            found[name] = kept[0]
    return found


def every_path(section: BaseModel, prefix: Key = ()) -> Iterator[tuple[Key, str, PathRule]]:
    """Yield (key, path, rule) for every path in a recipe or section."""
    for name, rule in path_rules(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from every_path(value, (*prefix, name))
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from every_path(item, (*prefix, name, index))
                elif rule is not None:
                    yield (*prefix, name, index), item, rule
        elif rule is not None and value is not None:
            yield (*prefix, name), value, rule


def paths_of(section: BaseModel) -> list[str]:
    """Return the paths and hub ids in a section, without built-in names."""
    return [
        value for _, value, rule in every_path(section) if not value.startswith(BUILTIN) and value not in rule.words
    ]
