"""The cells of a table's row, and a count of the columns that are not read.

Every reader of a row gets ``RowCells``, which records what is read. So unread columns are found without a list of known
columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text

MAX_COUNTED, MAX_NAMED, MAX_LETTERS = 1000, 50, 60
"""Limits: columns that are counted separately, columns that a notice names, and characters of a column name in a
notice.
"""
EMPTY_JSON = ("", "[]", "{}", "null")


class UnusableText(Exception):
    """A row or record that cannot be trained on.

    Attributes:
        what: the problem, as in ``errors.Problem``.
        fix: the remedy, as in ``errors.Problem``.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def has_content(value: object) -> bool:
    """Whether a cell or a message's value has content. Empty texts, lists, mappings and their JSON texts have none."""
    if isinstance(value, str):
        return value.strip() not in EMPTY_JSON
    return value is not None and not (isinstance(value, list | tuple | Mapping) and not value)


class RowCells(Mapping[str, Any]):
    """The cells of a row by column. Accessing a cell marks its column as read.

    Attributes:
        remarks: sentences about the row, without the full stop. ``RowAccount`` counts how many rows have each sentence.
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
        """Return a cell without marking its column as read; None if there is no such column."""
        return self._cells.get(column)

    @property
    def filled(self) -> frozenset[str]:
        """The columns with a cell that is not null."""
        return frozenset(column for column, cell in self._cells.items() if cell is not None)

    @property
    def left(self) -> list[str]:
        """The columns that have content but were not read."""
        return [str(column) for column, cell in self._cells.items() if column not in self._read and has_content(cell)]


def listed(names: Sequence[str]) -> str:
    """Join column names with commas, for a sentence. Only the first ``MAX_NAMED`` are named."""
    return _joined([_short(name) for name in names[:MAX_NAMED]], max(len(names) - MAX_NAMED, 0), "")


def _joined(names: Sequence[str], num_more: int, more: str) -> str:
    return ", ".join([*names, *([f"and {num_more}{more} others"] if num_more or more else [])])


def _short(name: str) -> str:
    return legible(name)[:MAX_LETTERS] or "one without a name"


@dataclass
class NameCount:
    """Counts the rows in which each unread column or key occurs."""

    of_name: Counter[str] = field(default_factory=Counter)
    num_more: int = 0

    def add(self, name: str) -> None:
        """Count a row for a column or key. Names after the first ``MAX_COUNTED`` are counted together."""
        if name in self.of_name or len(self.of_name) < MAX_COUNTED:
            self.of_name[name] += 1
        else:
            self.num_more += 1

    def notices(self, what: str, noun: str = "row") -> list[str]:
        """Return a notice that lists the names and their counts; empty if there are no names.

        Args:
            what: beginning of the sentence.
            noun: word for the counted things, in the singular.
        """
        found = self.of_name.most_common()
        names = [f"{_short(name)} ({count_text(count, noun)})" for name, count in found[:MAX_NAMED]]
        listing = _joined(names, len(found) - len(names), " or more" if self.num_more else "")
        return [f"{what}: {listing}."] if found else []


@dataclass
class RowAccount:
    """Collects the unread columns and the remarks of all rows of a source."""

    columns: NameCount = field(default_factory=NameCount)
    remarks: Counter[str] = field(default_factory=Counter)

    def add(self, row: RowCells) -> None:
        """Add a row after it was read."""
        for column in row.left:
            self.columns.add(column)
        self.remarks.update(row.remarks)

    def notices(self, source: str) -> list[str]:
        """Return notices about unread columns and remarks. ``source``: the source's name in the notices."""
        found = [f"{remark} ({count_text(count, 'row')} of {source})." for remark, count in self.remarks.most_common()]
        return found + self.columns.notices(f"Columns of {source} that are not read")
