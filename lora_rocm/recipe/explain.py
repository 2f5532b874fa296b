"""Turn pydantic's errors into problems for users, with the expected value, the given value and a fix."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lora_rocm.errors import Problem
from lora_rocm.recipe.kinds import FAMILY, OPTIMIZER, Kinds
from lora_rocm.recipe.peer_names import NO_SUCH_OPTIMIZER, value_advice
from lora_rocm.recipe.sections import LIST_TAG, Section
from lora_rocm.recipe.source_sections import DataSource
from lora_rocm.recipe.suggest import osa_distance, section_class, suggest
from lora_rocm.recipe.yaml_tree import MAX_PROBLEMS, Key, dotted, value_at

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "model": "a section with keys",
}
NOT_ALLOWED = {
    "finite_number": "has to be a finite number, got",
    "string_pattern_mismatch": "cannot be",
    "string_too_long": "is too long:",
    "string_too_short": "is empty:",
}
"""Words that precede a refused value in a message, by type of pydantic error.

These values have the correct type, but are not allowed.
"""
NO_SUCH_KEY = "there is no such key"
MAX_VALUE_LETTERS = 64  # comparing long strings is slow
COMPARED = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def shown(value: Any, limit: int = 60) -> str:
    """Return a value as one printable line of at most ``limit`` characters, for a message."""
    if isinstance(value, dict):
        return "a section"
    if value is None:
        return "nothing"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def explain(
    error: ValidationError,
    data: Any,
    where: Callable[[Key], str],
    kinds: Kinds,
    written: Callable[[Key], str] = lambda key: "",
) -> list[Problem]:
    """Return one problem for each place with an error, at most MAX_PROBLEMS.

    Args:
        error: pydantic's error from validating ``data`` with ``kinds.recipe``.
        data: the recipe data that failed.
        where: returns the file, line and name of a key, such as "file.yaml:12 lora.rank".
        kinds: the kinds of ``data``. In a section of an unknown kind, only keys that all its kinds have are reported.
        written: returns the spelling in the file of a number, true, false or null (see ``YamlTree.texts``).
    """
    expected: dict[Key, dict[str, None]] = {}
    problems: dict[Key, Problem] = {}
    details = error.errors(include_url=False)
    choices = {real_key(each, data): _choices(each) for each in details if each["type"] == "literal_error"}
    for detail in details:
        if len(problems) == MAX_PROBLEMS:
            break
        key = real_key(detail, data)
        if detail["type"] == "too_short" and any(other[: len(key)] == key for other in problems):
            continue  # pydantic does not count refused items, so that a list with some seems too short
        if not kinds.judges(key):
            continue
        phrase = None if detail["type"] in NOT_ALLOWED else EXPECTED.get(detail["type"].partition("_")[0])
        if phrase is not None:
            phrases = expected.setdefault(key, dict.fromkeys(choices.get(key, ())))
            phrases[phrase] = None  # an ordered set: thousands of list items may share a problem
            # the value from the file, because pydantic's own input for a union member may be only a part of it
            value = value_at(data, key, detail["input"])
            if phrase == "a whole number" and isinstance(value, float) and value.is_integer():  # far beyond 64 bits
                problems[key] = Problem(
                    where(key), f"is far too large or too small: {shown(value)}", _about(key, kinds.recipe)
                )
                continue
            text = written(key) if "text" in phrases else ""
            sentence = f"expected {' or '.join(phrases)}, got {text or shown(value)}"
            fix = value_advice(dotted(key), value) or _quote_advice(phrases, value, text) or _about(key, kinds.recipe)
            problems[key] = Problem(where(key), sentence, fix)
        elif detail["type"] == "rule":
            place, what, fix = _of_rule(detail, key)
            problems.setdefault((*place, "rule", what), Problem(where(place), what, fix))
        elif key not in problems or detail["type"] in (
            "too_long",
            *COMPARED,
        ):  # replaces the error of a union's other member
            problems[key] = Problem(where(key), *_sentence_and_fix(detail, key, kinds))
    return list(problems.values())


def real_key(detail: ErrorDetails, data: Any) -> Key:
    """Return the key with the error: its location without the names that pydantic gives to union members."""
    key: list[str | int] = []
    for index, part in enumerate(detail["loc"]):
        last = index == len(detail["loc"]) - 1
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif last and detail["type"] == "missing" and isinstance(part, str):
            pass
        elif isinstance(part, str) and (isinstance(data, dict) or part == LIST_TAG) and not last:
            continue  # the name of a union's member
        else:
            break
        key.append(part)
    return tuple(key)


def _of_rule(detail: ErrorDetails, key: Key) -> tuple[Key, str, str]:
    """Return (place, problem, fix) of an error raised by one of our own checks.

    The place may be a key below ``key``.
    """
    context = detail["ctx"]
    return tuple(context.get("place") or (*key, *context["at"])), context["what"], context["fix"]


def _sentence_and_fix(detail: ErrorDetails, key: Key, kinds: Kinds) -> tuple[str, str]:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "too_short" or (kind == "missing" and isinstance(detail["loc"][-1], int)):
        return f"has too few values: {shown(value)}", _about(key, kinds.recipe)
    if kind == "missing":
        return "is missing", _description(key, kinds.recipe)
    if kind == "extra_forbidden":
        names = list(_section_at(key[:-1], kinds.recipe).model_fields)
        owners = kinds.owners(dotted(key[:-1]), str(key[-1]).lower().replace("-", "_"))
        if owners:
            return NO_SUCH_KEY, f"{dotted(key)} is a key of {owners}."
        return NO_SUCH_KEY, suggest(str(key[-1]), names, dotted(key[:-1]), shown(value), kinds.recipe)
    if key == FAMILY and isinstance(value, str):
        return kinds.registry.refusal(value)
    if kind == "literal_error":
        choices = kinds.choices(key) or _choices(detail)
        fix = value_advice(dotted(key), value) or _near_choice(value, choices)
        fix = fix or (NO_SUCH_OPTIMIZER if key == OPTIMIZER else _about(key, kinds.recipe))
        return f"expected one of {', '.join(choices)}; got {shown(value)}", fix
    if kind == "too_long":
        return f"has more than {context['max_length']} items", _about(key, kinds.recipe)
    if kind in COMPARED:
        words, limit = COMPARED[kind]
        fix = _instead_of_more(key, kinds.recipe) if limit in ("lt", "le") else ""
        return f"has to be {words} {context[limit]}, got {shown(value)}", fix or _about(key, kinds.recipe)
    if kind in NOT_ALLOWED:
        return f"{NOT_ALLOWED[kind]} {shown(value)}", _about(key, kinds.recipe)
    message = detail["msg"]
    return f"{message[:1].lower()}{message[1:]}, got {shown(value)}", _about(key, kinds.recipe)


def _choices(detail: ErrorDetails) -> list[str]:
    """Return the valid values that a literal_error lists."""
    return [choice.strip("'\" ") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]


def _near_choice(value: Any, choices: Collection[str]) -> str:
    """Suggest the valid value that is spelled most like ``value``; empty if none is close.

    Names with digits, such as number formats, often differ in one letter only. Such a name is suggested only if it has
    exactly the same letters in another order.
    """
    if isinstance(value, str) and value.strip().lower() in choices:
        return f"Write {value.strip().lower()}."
    given = str(value)[:MAX_VALUE_LETTERS].lower()
    near = [choice for choice in choices if osa_distance(given, choice) == 1][:1]
    near = near or difflib.get_close_matches(given, choices, n=1, cutoff=0.7)
    if not near or (any(map(str.isdigit, near[0])) and sorted(near[0]) != sorted(str(value).lower())):
        return ""
    return f"Did you mean {near[0]}?"


def _quote_advice(expected: Collection[str], value: Any, written: str) -> str:
    """Return the advice to quote a value where text is expected; empty if it does not apply.

    YAML reads text such as 007 or True as a number, true, false or null. Quotes keep its zeros and its case.
    """
    if "text" in expected and not isinstance(value, str | list | dict) and (written or value is not None):
        return f'If it is text, quote it: "{written or value}".'
    return ""


def _section_at(key: Key, model: type[BaseModel]) -> type[BaseModel]:
    """Return the section class found by following ``key`` from ``model``."""
    for part in key:
        if isinstance(part, str):
            found = section_class(model.model_fields[part].annotation)
            assert found is not None, key
            model = found
    return model


def _field_at(key: Key, model: type[BaseModel]) -> FieldInfo:
    return _section_at(key[:-1], model).model_fields[str(key[-1])]


def _instead_of_more(key: Key, model: type[BaseModel]) -> str:
    """Return the section's own advice for a value above the upper limit of ``key``; empty if it has none."""
    *sections, name = (part for part in key if isinstance(part, str))
    section = _section_at(tuple(sections), model)
    return section.above_limit.get(name, "") if issubclass(section, Section) else ""


def _about(key: Key, model: type[BaseModel]) -> str:
    """Return the description and default of a key, used as the fix if there is no better advice."""
    names = tuple(part for part in key if isinstance(part, str))
    if not names:
        return ""
    field = _field_at(names, model)
    text = _description_of(field).strip().splitlines()[:1]
    default = field.default
    if isinstance(default, bool):
        text.append(f"The default is {str(default).lower()}.")
    elif isinstance(default, int | float):
        text.append(f"The default is {default:g}.")
    elif isinstance(default, str) and default:
        text.append(f"The default is {default}.")
    elif isinstance(default, tuple) and default:
        text.append(f"The default is [{', '.join(map(str, default))}].")
    return " ".join(text)


def _description_of(field: FieldInfo) -> str:
    section = section_class(field.annotation)
    return field.description or (section.__doc__ if section else "") or ""


def _description(key: Key, model: type[BaseModel]) -> str:
    text = _description_of(_field_at(key, model))
    return f"Add it: {text.strip().splitlines()[0]}" if text else ""


def boolean_problems(data: Any, where: Callable[[Key], str], kinds: Kinds) -> dict[Key, Problem]:
    """Return a problem for each true or false given where a number is expected. Pydantic would read them as 1 and 0."""
    return {
        key: Problem(where(key), f"expected a number, got {str(value).lower()}", _about((str(key[-1]),), model))
        for key, value, model in _booleans(data, kinds.recipe, ())
    }


def _booleans(data: Any, model: type[BaseModel], key: Key) -> Iterator[tuple[Key, Any, type[BaseModel]]]:
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        field = model.model_fields.get(name)
        if field is None:
            continue
        section = section_class(field.annotation)
        if section is DataSource and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _booleans(item, section, (*key, name, index))
        elif section is not None:
            yield from _booleans(value, section, (*key, name))
        elif _wants_number(field) and any(isinstance(v, bool) for v in (value if isinstance(value, list) else [value])):
            yield (*key, name), value, model


def _wants_number(field: FieldInfo) -> bool:
    kinds = set(_leaf_types(field.annotation))
    return bool(kinds & {int, float}) and bool not in kinds


def _leaf_types(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _leaf_types(part)
