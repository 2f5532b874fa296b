"""Whether a JSON document matches the description of its class in ``docs/reference/json.md``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from lora_rocm.json_reference import is_object, keys_of


def faults(value: Any, hint: Any, where: str = "") -> Iterator[str]:
    """Yield each place where a value does not match its type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if all(list(faults(value, part, where)) for part in arguments):
            yield f"{where}: {value!r:.60} is not {hint}"
    elif origin in (list, tuple) and isinstance(value, list):
        same = origin is list or Ellipsis in arguments
        if not same and len(value) != len(arguments):
            yield f"{where}: {len(value)} values"
        for number, item in enumerate(value[: None if same else len(arguments)]):
            yield from faults(item, arguments[0] if same else arguments[number], f"{where}[{number}]")
    elif origin in (dict, Mapping) and isinstance(value, dict):
        for name, item in value.items():
            yield from faults(item, arguments[1], f"{where}.{name}")
    elif is_object(hint) and isinstance(value, dict):
        yield from _key_faults(value, hint, where)
    elif not _is_plain(value, hint):
        yield f"{where}: {value!r:.60} is not {hint}"


def _key_faults(value: dict[str, Any], kind: type, where: str) -> Iterator[str]:
    keys = {key.name: key for key in keys_of(kind)}
    yield from (f"{where}.{name} is not documented" for name in value.keys() - keys.keys())
    for name, key in keys.items():
        if name in value:
            yield from faults(value[name], key.hint, f"{where}.{name}")
        elif not key.is_optional:
            yield f"{where}.{name} is missing"


def _is_plain(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint in (Any, object):
        return True
    if hint is type(None):
        return value is None
    if hint is float:  # null: it is not finite
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [member.value for member in hint]
    return isinstance(value, bool if hint is bool else str) and not is_object(hint)
