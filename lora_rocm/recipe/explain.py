"""Pydantic's findings in the user's words: expected what, got what, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lora_rocm.errors import Problem
from lora_rocm.recipe.schema import DataSource, Recipe
from lora_rocm.recipe.suggest import section_class, suggest
from lora_rocm.recipe.yaml_tree import MAX_PROBLEMS, Key, dotted

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "model": "a section with keys",
}
COMPARED = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message: at most ``limit`` letters, one line, printable anywhere."""
    if isinstance(value, dict):
        return "a section"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def explain(error: ValidationError, data: Any, where: Callable[[Key], str]) -> list[Problem]:
    """One problem a place, the first MAX_PROBLEMS of them. ``where`` turns a key into "file.yaml:12 lora.rank"."""
    expected: dict[Key, dict[str, None]] = {}
    problems: dict[Key, Problem] = {}
    for detail in error.errors(include_url=False):
        if len(problems) == MAX_PROBLEMS:
            break
        key = _real_key(detail, data)
        phrase = EXPECTED.get(detail["type"].partition("_")[0])
        if phrase is not None:
            phrases = expected.setdefault(key, {})
            phrases[phrase] = None  # a set in order: thousands of items of a list can have the same problem
            sentence = f"expected {' or '.join(phrases)}, got {shown(detail['input'])}"
            problems[key] = Problem(where(key), sentence, _quote_advice(phrases, detail["input"]))
        elif key not in problems:
            problems[key] = Problem(where(key), *_sentence_and_fix(detail, key))
    return list(problems.values())


def _real_key(detail: ErrorDetails, data: Any) -> Key:
    """The location without pydantic's own names of union members."""
    key: list[str | int] = []
    for index, part in enumerate(detail["loc"]):
        last = index == len(detail["loc"]) - 1
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not (last and detail["type"] == "missing" and isinstance(part, str)):
            break
        key.append(part)
    return tuple(key)


def _sentence_and_fix(detail: ErrorDetails, key: Key) -> tuple[str, str]:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing" and isinstance(detail["loc"][-1], int):
        return f"has too few values: {shown(value)}", ""
    if kind == "missing":
        return "is missing", _description(key)
    if kind == "extra_forbidden":
        parent = _section_at(key[:-1])
        return "there is no such key", suggest(str(key[-1]), list(parent.model_fields), dotted(key[:-1]))
    if kind == "literal_error":
        choices = [choice.strip("'\" ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"expected one of {', '.join(choices)}; got {shown(value)}", f"Did you mean {near[0]}?" if near else ""
    if kind in COMPARED:
        words, limit = COMPARED[kind]
        return f"has to be {words} {context[limit]}, got {shown(value)}", ""
    if kind == "value_error":
        return str(context["error"]), ""
    message = detail["msg"]
    return f"{message[:1].lower()}{message[1:]}, got {shown(value)}", ""


def _quote_advice(expected: Collection[str], value: Any) -> str:
    if "text" in expected and isinstance(value, int | float) and not isinstance(value, bool):
        return f'To mean the text, put it in quotes: "{value}".'
    return ""


def _section_at(key: Key) -> type[BaseModel]:
    """The section that holds the keys below ``key``."""
    model: type[BaseModel] = Recipe
    for part in key:
        if isinstance(part, str):
            found = section_class(model.model_fields[part].annotation)
            assert found is not None, key
            model = found
    return model


def _description(key: Key) -> str:
    field = _section_at(key[:-1]).model_fields[str(key[-1])]
    section = section_class(field.annotation)
    text = field.description or (section.__doc__ if section else "") or ""
    return f"Add it: {text.strip().splitlines()[0]}" if text else ""


def boolean_problems(data: Any, where: Callable[[Key], str]) -> Iterator[Problem]:
    """Problems for true and false where a number is wanted: pydantic would take them for 1 and 0."""
    yield from _booleans(data, Recipe, (), where)


def _booleans(data: Any, model: type[BaseModel], key: Key, where: Callable[[Key], str]) -> Iterator[Problem]:
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        field = model.model_fields.get(name)
        if field is None:
            continue
        section = section_class(field.annotation)
        if section is DataSource and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _booleans(item, section, (*key, name, index), where)
        elif section is not None:
            yield from _booleans(value, section, (*key, name), where)
        elif _wants_number(field) and any(isinstance(v, bool) for v in (value if isinstance(value, list) else [value])):
            yield Problem(where((*key, name)), f"expected a number, got {str(value).lower()}")


def _wants_number(field: FieldInfo) -> bool:
    kinds = set(_leaf_types(field.annotation))
    return bool(kinds & {int, float}) and bool not in kinds


def _leaf_types(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _leaf_types(part)
