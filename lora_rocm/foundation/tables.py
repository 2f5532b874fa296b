"""Reads the package's tables: TOML files next to the modules that use them. Imports only the standard library.

A file or row becomes a frozen dataclass with a field for each key. A row names a function by a key of the
dictionary that the module passes. A file with facts that become outdated has an additional key ``review`` with the
fields of ``Review``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from functools import cache
from pathlib import Path
from reprlib import repr as short
from types import GenericAlias, NoneType, UnionType
from typing import TYPE_CHECKING, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lora_rocm.errors import MachineError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table = TypeVar("Table")
Functions = Mapping[str, Callable[..., object]]


REVIEW = "review"


@dataclass(frozen=True)
class Review:
    """The date of the last check of a whole file against current releases.

    newest: the newest releases at that time ("ROCm 10.1, torch 2.14").
    """

    day: date
    newest: str


def read_review(path: Path) -> Review:
    """Return the review of a file.

    Raises:
        MachineError: the file cannot be read, or has no review.
    """
    content = _all_content(path)
    if REVIEW not in content:
        raise _invalid("a key is missing", path, (REVIEW,))
    return _review(path, content[REVIEW])


def _review(path: Path, value: object) -> Review:
    found = _TableReader(path, None).value(Review, value, (REVIEW,))
    assert isinstance(found, Review)
    return found


def read_table(path: Path, table: type[Table], functions: Functions | None = None) -> Table:
    """Return a file as a dataclass. Arrays become tuples, and tables in arrays become dataclasses.

    Raises:
        MachineError: the file cannot be read, or a row is invalid. The error names the row and the key.
    """
    found = _TableReader(path, functions).value(table, _content(path), ())
    assert isinstance(found, table)
    return found


def read_rows(path: Path, row: type[Table], functions: Functions | None = None) -> tuple[Table, ...]:
    """Return the rows of a file that contains a single array of tables. Errors are raised as in ``read_table``."""
    content = _content(path)
    if len(content) != 1:
        raise _invalid("it is not one array of tables", path)
    ((name, rows),) = content.items()
    found = _TableReader(path, functions).value(GenericAlias(tuple, (row, ...)), rows, (name,))
    assert isinstance(found, tuple)
    return found


def by_name(*functions: Callable[..., object]) -> dict[str, Callable[..., object]]:
    """Return the functions by the name that rows use: the function's name without a leading underscore."""
    return {function.__name__.lstrip("_"): function for function in functions}


def _content(path: Path) -> dict[str, object]:
    """Return the content of a file without its review. The review is only checked."""
    content = _all_content(path)
    if REVIEW in content:
        _review(path, content.pop(REVIEW))
    return content


def _all_content(path: Path) -> dict[str, object]:
    import tomllib  # only commands that read a table wait for it

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _invalid(str(error), path) from error


class _TableReader:
    """Converts TOML values to dataclasses. ``at``: keys and row names that lead to a value, for messages."""

    def __init__(self, path: Path, functions: Functions | None) -> None:
        self._path, self._functions = path, functions or {}

    def value(self, kind: object, value: object, at: tuple[str, ...]) -> object:
        """Return a value converted to the type annotation ``kind``."""
        if type(value) is kind:
            return value
        origin, of = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self.value(_member(of, value), value, at)
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
            return self._row(kind, value, at)
        if origin is tuple and isinstance(value, list):
            return tuple(self.value(of[0], item, (*at, _name(item, n))) for n, item in enumerate(value, 1))
        if origin is Mapping and isinstance(value, dict):
            return {self.value(of[0], key, at): self.value(of[1], item, (*at, key)) for key, item in value.items()}
        if origin is Callable and isinstance(value, str) and value in self._functions:
            return self._functions[value]
        if origin is Literal and value in of:
            return value
        raise _invalid(f"{short(value)} is not a valid value of this key", self._path, at)

    def _row(self, kind: type[DataclassInstance], row: dict[str, object], at: tuple[str, ...]) -> object:
        hints, needed = _fields(kind)
        for key in row.keys() - hints.keys():
            raise _invalid("there is no such key", self._path, (*at, key))
        for key in needed - row.keys():
            raise _invalid("a key is missing", self._path, (*at, key))
        return kind(**{key: self.value(hints[key], value, (*at, key)) for key, value in row.items()})


@cache
def _fields(kind: type[DataclassInstance]) -> tuple[Mapping[str, object], frozenset[str]]:
    """Return the annotations of a dataclass, and the names of fields without a default."""
    needed = (field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING)
    return get_type_hints(kind), frozenset(needed)


def _member(members: tuple[object, ...], value: object) -> object:
    """Return the member of a union that fits a value: a dataclass for a TOML table, another type for other values."""
    if type(value) in members:
        return type(value)
    given = [member for member in members if member is not NoneType]
    return next((member for member in given if is_dataclass(member) is isinstance(value, dict)), given[0])


def _name(row: object, number: int) -> str:
    named = row.get("id") if isinstance(row, dict) else None
    return f"{number} ({named})" if named is not None else str(number)


def _invalid(what: str, path: Path, at: tuple[str, ...] = ()) -> MachineError:
    where = ", ".join((str(path), *at))
    what = f"A table of lora-rocm is damaged: {what}."
    return MachineError("table-invalid", what, where=where, fix="Install lora-rocm again.")
