"""Converts values of ``--set`` that a user typed as one text for a key that takes a list."""

from __future__ import annotations

import types
from typing import Union, get_args, get_origin

from pydantic import BaseModel

from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.suggest import section_class
from lora_rocm.recipe.yaml_tree import Key


def one_as_list(key: Key, value: object) -> object:
    """Return the value. If the key takes a list of texts, convert a single text to a list."""
    return [value] if isinstance(value, str) and _takes_texts(key) else value


def _takes_texts(key: Key) -> bool:
    """Whether a key accepts only a list of texts or null."""
    section = section_class(Recipe.model_fields[str(key[0])].annotation) if key[0] in Recipe.model_fields else None
    field = section.model_fields.get(str(key[1])) if section is not None and len(key) == 2 else None
    if field is None:
        return False
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else []
    kinds = [kind for kind in kinds or [field.annotation] if kind is not types.NoneType]
    return all(get_origin(kind) is tuple and _holds_texts(get_args(kind)) for kind in kinds)


def _holds_texts(items: tuple[object, ...]) -> bool:
    return items[1:] == (Ellipsis,) and not (isinstance(items[0], type) and issubclass(items[0], BaseModel))
