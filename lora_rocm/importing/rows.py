"""The table of one trainer's keys: the recipe key of each, and the trainer's defaults (``trainers/*.toml``)."""

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
    """The recipe key for some keys, or the reason why there is none.

    Attributes:
        keys: names of the same meaning, dotted below sections, without list indices, in lower case. A name without
            sections also matches the last part of a dotted key.
        kind: same: the value is copied to ``ours``. convert: ``function`` decides. not-needed: the key does not change
            the result here. unsupported: lora-rocm cannot do it.
        ours: the recipe key, dotted. With ``convert`` only the key that a reader may expect.
        function: name of the function that converts, in the trainer's module.
        note: for convert: how the meaning differs. For not-needed: why. For unsupported: the effect of the key.
        neutral: values without an effect: the key is not reported as unsupported then.
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
    """The file of one trainer.

    Attributes:
        name: of the trainer, for sentences.
        version: the source that the table was made from: a version or commit with its date.
        defaults: its key -> the value it uses if the key is absent. Only defaults that differ from ours need a row.
        row: one row per key.
        include: the table of a library that the trainer passes its other keys to; its rows follow, without the keys
            that have rows here.
        warmup_from_zero: whether the first update of a warm-up has the rate 0.
    """

    name: str
    version: str
    row: tuple[MappingRow, ...]
    defaults: Mapping[str, str | int | float | bool]
    include: str = ""
    warmup_from_zero: bool = True


FOLDER = Path(__file__).with_name("trainers")


@cache
def table_of(trainer: str) -> TrainerTable:
    """The table of a trainer by its id, such as "kohya". See ``read_table`` for errors."""
    table = read_table(FOLDER / f"{trainer}.toml", TrainerTable)
    if not table.include:
        return table
    own = {key for row in table.row for key in row.keys}
    included = [
        replace(row, keys=tuple(key for key in row.keys if key not in own)) for row in table_of(table.include).row
    ]
    return replace(table, row=(*table.row, *(row for row in included if row.keys)))


def review_of(trainer: str) -> Review:
    """The last comparison of the table with the trainer's source. See ``read_review`` for errors."""
    return read_review(FOLDER / f"{trainer}.toml")
