"""Tables of a trainer's keys (``trainers/*.toml``), with the corresponding recipe keys and the trainer's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from lora_rocm.foundation.tables import Review, read_review, read_table

Kind = Literal["same", "convert", "not-needed", "unsupported"]


@dataclass(frozen=True)
class MappingRow:
    """A row for keys of the same meaning: their recipe key, or the reason why there is none.

    Attributes:
        keys: the trainer's names for the key in lower case, dotted, without list indices. A name without sections also
            matches the last part of a dotted key.
        kind: same: the value is copied to ``ours``. convert: ``function`` decides. not-needed: the key does not change
            the result here. unsupported: lora-rocm cannot do it.
        ours: the dotted recipe key. For convert, it is only the most likely key.
        function: for convert, name of the converting function in the trainer's module.
        note: for convert: how the meaning differs. For not-needed: why. For unsupported: the effect of the key.
        neutral: values without an effect. A key with such a value is not reported as unsupported.
        changes_weights: whether losing an unsupported key changes the trained weights.
    """

    keys: tuple[str, ...]
    kind: Kind
    ours: str = ""
    function: str = ""
    note: str = ""
    neutral: tuple[str | int | float | bool, ...] = ()
    changes_weights: bool = True


@dataclass(frozen=True)
class TrainerTable:
    """The table of one trainer.

    Attributes:
        name: name of the trainer, for messages.
        version: version or commit of the trainer's source on which the table is based, with its date.
        defaults: maps a key of the trainer to its default value. Only defaults that differ from ours are needed.
        row: one row per key.
        include: name of another table, for a library to which the trainer passes its other keys. Rows of this table
            take precedence.
    """

    name: str
    version: str
    row: tuple[MappingRow, ...]
    defaults: Mapping[str, str | int | float | bool]
    include: str = ""


FOLDER = Path(__file__).with_name("trainers")


@cache
def table_of(trainer: str) -> TrainerTable:
    """Return the table of a trainer by its id, such as "kohya". See ``read_table`` for errors."""
    table = read_table(FOLDER / f"{trainer}.toml", TrainerTable)
    if not table.include:
        return table
    own = {key for row in table.row for key in row.keys}
    included = [
        replace(row, keys=tuple(key for key in row.keys if key not in own)) for row in table_of(table.include).row
    ]
    return replace(table, row=(*table.row, *(row for row in included if row.keys)))


def review_of(trainer: str) -> Review:
    """Return the date of the last comparison of the table with the trainer's source. See ``read_review`` for errors."""
    return read_review(FOLDER / f"{trainer}.toml")
