"""The fastest correct choices that tuning trials found, stored until GPU, driver, software or shapes change.

A run that uses such choices has its own copy (``rundir.layout.RunDir.tuned``). Standard library only.
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
    """One tuned choice: an attention backend, or a table of matrix products.

    Attributes:
        key: conditions under which it is valid: software stack, packages, and the recipe values that determine the
            shapes.
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
    """The tuned choices that a run uses. ``table``: path of the table of matrix products."""

    attention: Choice | None = None
    products: Choice | None = None
    table: str = ""


def choice_from_json(value: Mapping[str, Any]) -> Choice:
    """Build a choice from the result of ``Choice.to_json``.

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
    """Whether a row contains an attention backend with its time, or with its fault."""
    took = isinstance(row["seconds"], int | float) if row.get("problem") is None else isinstance(row["problem"], str)
    return took and isinstance(row["way"], str)


def store(folder: Path, choice: Choice) -> None:
    """Write a choice to ``folder``, and for matrix products also the table file that torch reads.

    Raises:
        StorageError: the choice cannot be written.
    """
    path = path_of(folder, choice.kind, choice.key)
    write_json(path, choice.to_json())
    if choice.kind == "products":
        write_atomic(table_of(path), choice.chosen.encode("ascii"))


def stored(folder: Path, kind: Kind, key: Mapping[str, Any]) -> Choice | None:
    """Return the stored choice for this key, or None if it is missing or damaged."""
    try:
        # json: the program's own file, rebuilt if it is damaged
        found = choice_from_json(json.loads(path_of(folder, kind, key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if found.key == key and found.kind == kind else None


def path_of(folder: Path, kind: Kind, key: Mapping[str, Any]) -> Path:
    """Return the path of the file with the choice for this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{kind}-{digest}.json"


def table_of(path: Path) -> Path:
    """Return the path of the table file that belongs to the choice file ``path``."""
    return path.with_suffix(".csv")
