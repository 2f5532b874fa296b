"""The cells of a row of a table of texts, and the account of unread cells.

Every reader of a row gets ``RowCells``, so unread columns are known without a list of known columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text

MAX_COUNTED, MAX_NAMED, MAX_LETTERS = 1000, 50, 60
"""Columns that are counted separately, columns that a notice names, and letters of a column's name in a notice."""
EMPTY_JSON = ("", "[]", "{}", "null")


class UnusableText(Exception):
    """A row or record that cannot be trained on.

    Attributes:
        what, fix: the problem and its remedy, as in ``errors.Problem``.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def has_content(value: object) -> bool:
    """Whether a cell or a value of a message has content: an empty text, list or mapping has none."""
    if isinstance(value, str):
        return value.strip() not in EMPTY_JSON
    return value is not None and not (isinstance(value, list | tuple | Mapping) and not value)


class RowCells(Mapping[str, Any]):
    """The cells of a row by column. Records the columns that are read.

    Attributes:
        remarks: sentences about the row, without the full stop; ``RowAccount`` counts rows with the same sentence.
    """

    def __init__(self, cells: Mapping[str, Any]) -> None:
        self._cells, self._read, self.remarks = cells, set[str](), set[str]()

    def __getitem__(self, column: str) -> Any:
        self._read.add(column)
        return self._cells[column]

    def __contains__(self, column: object) -> bool:
        return column in self._cells

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def unread(self, column: str) -> Any:
        """A cell, or None, without noting that it was read."""
        return self._cells.get(column)

    @property
    def filled(self) -> frozenset[str]:
        """Columns with a cell that is not null."""
        return frozenset(column for column, cell in self._cells.items() if cell is not None)

    @property
    def left(self) -> list[str]:
        """Columns with content that were not read."""
        return [str(column) for column, cell in self._cells.items() if column not in self._read and has_content(cell)]


def listed(names: Sequence[str]) -> str:
    """Names of columns as a part of a sentence."""
    return _joined([_short(name) for name in names[:MAX_NAMED]], max(len(names) - MAX_NAMED, 0), "")


def _joined(names: Sequence[str], num_more: int, more: str) -> str:
    return ", ".join([*names, *([f"and {num_more}{more} others"] if num_more or more else [])])


def _short(name: str) -> str:
    return legible(name)[:MAX_LETTERS] or "one without a name"


@dataclass
class NameCount:
    """Number of rows by unread name (of a column, or of a key)."""

    of_name: Counter[str] = field(default_factory=Counter)
    num_more: int = 0

    def add(self, name: str) -> None:
        """Count a row. Names beyond ``MAX_COUNTED`` are counted together."""
        if name in self.of_name or len(self.of_name) < MAX_COUNTED:
            self.of_name[name] += 1
        else:
            self.num_more += 1

    def notices(self, what: str, noun: str = "row") -> list[str]:
        """A notice with the names, each with its count; none if there are no names. ``what`` begins the sentence."""
        found = self.of_name.most_common()
        names = [f"{_short(name)} ({count_text(count, noun)})" for name, count in found[:MAX_NAMED]]
        listing = _joined(names, len(found) - len(names), " or more" if self.num_more else "")
        return [f"{what}: {listing}."] if found else []


@dataclass
class RowAccount:
    """Unread content of the rows of one source."""

    columns: NameCount = field(default_factory=NameCount)
    remarks: Counter[str] = field(default_factory=Counter)

    def add(self, row: RowCells) -> None:
        """Add a row that was read."""
        for column in row.left:
            self.columns.add(column)
        self.remarks.update(row.remarks)

    def notices(self, source: str) -> list[str]:
        """Notices about a source. ``source``: its name for people."""
        found = [f"{remark} ({count_text(count, 'row')} of {source})." for remark, count in self.remarks.most_common()]
        return found + self.columns.notices(f"Columns of {source} that nothing reads")
