"""Tables of the package: TOML files beside the code that reads them, as frozen dataclasses. Standard library only.

The keys of a file or row are the fields of its dataclass. A row names a function by a key of the dictionary that the
reading module gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lora_rocm.errors import MachineError

Table = TypeVar("Table")
Functions = Mapping[str, Callable[..., object]]


def read_table(path: Path, table: type[Table], functions: Functions | None = None) -> Table:
    """The file as one ``table``. An array of tables is a tuple of dataclasses, an array is a tuple.

    Raises:
        MachineError: the file cannot be read, or a row does not fit. It names the row and the key.
    """
    import tomllib  # only commands that read a table wait for it

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _invalid(str(error), path) from error
    found: Table = _Reader(path, functions or {}).value(table, content, ())
    return found


class _Reader:
    """Converts the values of a file. ``at`` in its methods is the place of a value: keys and names of rows."""

    def __init__(self, path: Path, functions: Functions) -> None:
        self._path, self._functions = path, functions

    def value(self, kind: Any, value: object, at: tuple[str, ...]) -> Any:
        """The value as a ``kind``, which is an annotation."""
        if type(value) is kind:
            return value
        origin, of = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self.value(_member(of, value), value, at)
        if is_dataclass(kind) and isinstance(value, dict):
            return self._row(kind, value, at)
        if origin is tuple and isinstance(value, list):
            return tuple(self.value(of[0], item, (*at, _name(item, n))) for n, item in enumerate(value, 1))
        if origin is Mapping and isinstance(value, dict):
            return {self.value(of[0], key, at): self.value(of[1], item, (*at, key)) for key, item in value.items()}
        if origin is Callable and isinstance(value, str) and value in self._functions:
            return self._functions[value]
        if origin is Literal and value in of:
            return value
        raise _invalid(f"{short(value)} is none of the values that this key takes", self._path, at)

    def _row(self, kind: Any, row: dict[str, object], at: tuple[str, ...]) -> Any:
        hints, needed = _fields(kind)
        for key in row.keys() - hints.keys():
            raise _invalid("there is no such key", self._path, (*at, key))
        for key in needed - row.keys():
            raise _invalid("a key is missing", self._path, (*at, key))
        return kind(**{key: self.value(hints[key], value, (*at, key)) for key, value in row.items()})


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The annotations of a dataclass, and the names of the fields without a default."""
    needed = (field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING)
    return get_type_hints(kind), frozenset(needed)


def _member(members: tuple[Any, ...], value: object) -> Any:
    """The member of a union that a value is meant as: a table is a dataclass, anything else is not."""
    given = [member for member in members if member is not NoneType]
    return next((member for member in given if is_dataclass(member) is isinstance(value, dict)), given[0])


def _name(row: object, number: int) -> str:
    named = row.get("id") if isinstance(row, dict) else None
    return f"{number} ({named})" if named is not None else str(number)


def _invalid(what: str, path: Path, at: tuple[str, ...] = ()) -> MachineError:
    where = ", ".join((str(path), *at))
    return MachineError(
        "table-invalid", f"A table of lora-rocm is damaged: {what}.", where=where, fix="Install lora-rocm again."
    )
