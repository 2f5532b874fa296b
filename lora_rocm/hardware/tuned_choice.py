"""The fastest correct choices of trials on this machine, kept until GPU, driver, software or shapes change.

A run that uses such choices has its own copy of them (``rundir.layout.RunDir.tuned``). Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lora_rocm.foundation.files import write_atomic, write_json
from lora_rocm.hardware.settings import Attention

Kind = Literal["attention", "products"]
FORMAT = 1


@dataclass(frozen=True)
class Choice:
    """One choice.

    Attributes:
        key: the conditions as plain values: software stack, packages, and the recipe's values that decide the shapes.
        chosen: the attention backend, or the table of matrix products in TunableOp's format.
        rows: the measurements, one row per candidate or product.
    """

    kind: Kind
    key: Mapping[str, Any]
    chosen: str
    rows: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


@dataclass(frozen=True)
class Tuned:
    """The choices in force. ``table``: the file of the products' table."""

    attention: Choice | None = None
    products: Choice | None = None
    table: str = ""


def choice_from_json(value: Mapping[str, Any]) -> Choice:
    """The inverse of ``Choice.to_json``.

    Raises:
        KeyError, TypeError, ValueError: the value is not a result of ``to_json``.
    """
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']}")
    kind, chosen, rows = value["kind"], value["chosen"], tuple(map(dict, value["rows"]))
    if kind == "attention":
        fits = chosen in ("sdpa", *get_args(Attention)) and all(map(_is_trial, rows))
    else:
        fits = kind == "products" and isinstance(chosen, str) and chosen.isascii() and "\0" not in chosen
    if not fits:
        raise ValueError(f"no choice of {kind}")
    return Choice(kind, dict(value["key"]), chosen, rows)


def _is_trial(row: Mapping[str, object]) -> bool:
    """Whether a row has the time of an attention backend, or its fault."""
    took = isinstance(row["seconds"], int | float) if row.get("problem") is None else isinstance(row["problem"], str)
    return took and isinstance(row["way"], str)


def store(folder: Path, choice: Choice) -> None:
    """Keep a choice, and next to it the table that torch reads.

    Raises:
        StorageError: it cannot be written.
    """
    path = path_of(folder, choice.kind, choice.key)
    write_json(path, choice.to_json())
    if choice.kind == "products":
        write_atomic(table_of(path), choice.chosen.encode("ascii"))


def stored(folder: Path, kind: Kind, key: Mapping[str, Any]) -> Choice | None:
    """The kept choice for this key, or None. A damaged file counts as none."""
    try:
        found = choice_from_json(json.loads(path_of(folder, kind, key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if found.key == key and found.kind == kind else None


def path_of(folder: Path, kind: Kind, key: Mapping[str, Any]) -> Path:
    """The file of the choice for this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{kind}-{digest}.json"


def table_of(path: Path) -> Path:
    """The file of the table next to a kept choice."""
    return path.with_suffix(".csv")
