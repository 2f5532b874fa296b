"""Writes jobs and answers of child processes as JSON, and reads them back as the same dataclasses.

Fields may be texts, numbers, bool, None, ``Path``, tuples, lists, dictionaries, unions with None, other
dataclasses, and ``Any`` for JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path, PurePath
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lora_rocm.errors import MachineError
from lora_rocm.foundation.files import write_json

CHILD = "child"
"""JSON key for the child's name in a job, and for the type in a request. The other keys are the fields."""
T = TypeVar("T")


class MisfitError(ValueError):
    """A JSON value does not have the required type."""


def to_json(value: Any) -> Any:
    """Return a value with dataclasses, paths and tuples converted to JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], value: object) -> T:
    """Return a result of ``to_json`` converted back to the type ``kind``.

    Raises:
        MisfitError: a field is missing, unknown or of another type. The message names the field.
    """
    return cast(T, _read(kind, value, kind.__name__))


def _read(kind: Any, value: Any, at: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (kind,) = (member for member in of if member is not NoneType)
        return None if value is None else _read(kind, value, at)
    if origin in (tuple, list) and isinstance(value, list):
        return _read_items(origin, of, value, at)
    if origin is dict and isinstance(value, dict):
        return {_key(of[0], key, at): _read(of[1], item, f"{at}[{key!r}]") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(cast(type, kind), value, at)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is Any or type(value) is kind:
        return value
    raise MisfitError(f"{at} is {short(value)}, not {getattr(kind, '__name__', kind)}")


def _read_items(origin: type, of: tuple[Any, ...], value: list[Any], at: str) -> Any:
    kinds = of[:1] * len(value) if origin is list or of[-1] is ... else of
    if len(kinds) != len(value):
        raise MisfitError(f"{at} has {len(value)} items, not {len(kinds)}")
    return origin(
        _read(kind, item, f"{at}[{number}]") for number, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _read_fields(kind: type, value: dict[str, Any], at: str) -> Any:
    hints = _hints(kind)
    for name in sorted(value.keys() ^ hints.keys()):
        raise MisfitError(f"{at}.{name} is {'unknown' if name in value else 'missing'}")
    return kind(**{name: _read(hint, value[name], f"{at}.{name}") for name, hint in hints.items()})


def _key(kind: Any, key: str, at: str) -> Any:
    if kind is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise MisfitError(f"{at} has the key {short(key)}, which is not a number") from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def write_job_file(path: Path, child: str, job: object) -> None:
    """Write a job for the child with this name.

    Raises:
        StorageError: the file cannot be written.
    """
    write_json(path, {CHILD: child, **to_json(job)})


def job_text(name: str, job: object) -> str:
    """Return the content of a job file as one line of ASCII, for a child's command line or standard input."""
    return json.dumps({CHILD: name, **to_json(job)})


def read_job_file(path: Path, kinds: Mapping[str, type[T]]) -> T:
    """Return the job in a file. ``kinds``: class of each child's job.

    Raises:
        MachineError: job-unreadable: the file cannot be read, or its text is invalid (see ``read_job_text``).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(error, str(path)) from error
    return read_job_text(text, kinds, str(path))


def read_job_text(text: str, kinds: Mapping[str, type[T]], where: str) -> T:
    """Return the job in a text.

    Args:
        text: the content of a job file.
        kinds: class of each child's job, keyed by the child's name. Only these jobs are accepted.
        where: origin of the text, for the message.

    Raises:
        MachineError: job-unreadable: the text is not a job, the job is for another child, or a field is missing,
            unknown or of another type.
    """
    try:
        value = json.loads(text)  # json: a job or an answer of another process of the same start
        child = value.pop(CHILD, None) if isinstance(value, dict) else None
        if not isinstance(child, str) or child not in kinds:
            raise MisfitError(f"it is a job for {short(child)}, but this process is for {' or '.join(kinds)}")
        return from_json(kinds[child], value)
    except ValueError as error:
        raise _unreadable(error, where) from error


def _unreadable(error: Exception, where: str) -> MachineError:
    what = f"A job that lora-rocm gave its child process cannot be read: {error}."
    fix = "Install lora-rocm again: its parts seem to be of different versions."
    return MachineError("job-unreadable", what, where=where, fix=fix)
