"""Replace ``optim.optimizer_args`` (kohya's optimizer arguments) by the typed keys of the optimizer.

The recipe then has only typed keys, which are validated, written to the run's recipe and compared on a resume.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lora_rocm.errors import Problem
from lora_rocm.foundation.tables import read_table
from lora_rocm.recipe.explain import shown
from lora_rocm.recipe.kinds import OPTIMIZER, kinds_of
from lora_rocm.recipe.layers import Layered, ValueOrigin
from lora_rocm.recipe.optim_sections import ARGUMENTS_KEY, OPTIMIZERS, OptimSection
from lora_rocm.recipe.peer_names import advice
from lora_rocm.recipe.sections import MAX_ITEMS
from lora_rocm.recipe.yaml_tree import Key, dotted

ARGUMENTS: Key = ("optim", ARGUMENTS_KEY)
WORDS: dict[str, object] = {"true": True, "false": False, "none": None, "null": None, "inf": math.inf}
MAX_LETTERS = 200  # of a value that is parsed
EXAMPLE = 'For example ["weight_decay=0.01", "betas=0.9,0.99"].'


@dataclass(frozen=True)
class Renamed:
    """The name of an argument of some optimizers -> their key in ``optim``."""

    name: str
    key: str
    optimizers: tuple[str, ...]


@dataclass(frozen=True)
class Unset:
    """The value of a key that means the same as no value."""

    key: str
    value: str


@dataclass(frozen=True)
class Fixed:
    """The value that an argument without a key always has. optimizers: empty for all."""

    name: str
    value: str
    optimizers: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerArgTables:
    """The tables of ``optimizer_args.toml``."""

    renamed: tuple[Renamed, ...]
    unset: tuple[Unset, ...]
    fixed: tuple[Fixed, ...]


@cache
def names() -> OptimizerArgTables:
    """The tables. See ``read_table`` for errors."""
    return read_table(Path(__file__).with_name("optimizer_args.toml"), OptimizerArgTables)


@dataclass(frozen=True)
class Argument:
    """One entry. part: its index or name in ``optim.optimizer_args``."""

    name: str
    value: object
    part: str | int


def resolve_arguments(layers: Layered) -> list[Problem]:
    """Replace ``optim.optimizer_args`` by typed keys; a key of a higher layer takes precedence.

    If the optimizer is unknown, nothing changes: its arguments are unknown too, and its name is already reported.

    Args:
        layers: all layers of a recipe, before its validation; changed in place.

    Returns:
        A problem for each entry that the optimizer does not accept, and for each key with two values in one layer.
    """
    optim = layers.data.get("optim")
    if not isinstance(optim, dict) or ARGUMENTS_KEY not in optim:
        return []
    kinds = kinds_of(layers.data)
    if OPTIMIZER in kinds.unknown:
        return []
    named = kinds.name_of("optim")
    problems: list[Problem] = []
    for entry in _entries(optim.pop(ARGUMENTS_KEY), layers, problems):
        key = _key(entry, named)
        if key:
            problems += _set_key(optim, key, entry, layers)
        elif not any(_read(row.value) == entry.value for row in _fixed(entry.name, named)):
            problems.append(_unknown(entry, named, _where(layers, entry)))
    return problems


def _entries(given: object, layers: Layered, problems: list[Problem]) -> Iterator[Argument]:
    where = layers.where(ARGUMENTS)
    if not isinstance(given, list | dict):
        problems.append(Problem(where, f"expected a list or a mapping, got {shown(given)}", EXAMPLE))
    elif len(given) > MAX_ITEMS:
        problems.append(Problem(where, f"has more than {MAX_ITEMS} items", EXAMPLE))
    elif isinstance(given, dict):
        yield from (Argument(name, _read(value), name) for name, value in given.items())
    else:
        for index, text in enumerate(given):
            if isinstance(text, str) and "=" in text:
                name, _, value = text.partition("=")
                yield Argument(name.strip(), _read(value.strip()), index)
            else:
                place = layers.where((*ARGUMENTS, index))
                problems.append(Problem(place, f"expected name=value, got {shown(text)}", EXAMPLE))


def _read(value: object) -> object:
    """Parse text as a Python literal, as kohya does; ``true``, ``none`` and ``inf`` in any case."""
    if not isinstance(value, str) or len(value) > MAX_LETTERS:
        return value
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # a word, such as a choice
        return value
    return list(read) if isinstance(read, tuple) else read


def _key(entry: Argument, optimizer: str) -> str:
    """The key of ``optim`` for an entry; empty if the optimizer has none."""
    if entry.name in OPTIMIZERS[optimizer].arguments():
        return entry.name
    rows = (row for row in names().renamed if row.name == entry.name and optimizer in row.optimizers)
    return next((row.key for row in rows), "")


def _fixed(name: str, optimizer: str) -> list[Fixed]:
    return [row for row in names().fixed if row.name == name and optimizer in (row.optimizers or OPTIMIZERS)]


def _where(layers: Layered, entry: Argument) -> str:
    """Origin and name of an entry."""
    return f"{_place(layers, entry)} {dotted((*ARGUMENTS, entry.part))}"


def _place(layers: Layered, entry: Argument) -> ValueOrigin:
    at: Key = (*ARGUMENTS, entry.part)
    near = next((at[:n] for n in range(len(at), 0, -1) if at[:n] in layers.places), None)
    return layers.places[near] if near else ValueOrigin(layers.origin)


def _set_key(optim: dict[str, object], key: str, entry: Argument, layers: Layered) -> list[Problem]:
    """Set a key, unless a higher layer sets it. A different value in the same layer is a problem."""
    value = None if any((row.key, _read(row.value)) == (key, entry.value) for row in names().unset) else entry.value
    at, place = ("optim", key), replace(_place(layers, entry), name=f"optim.{ARGUMENTS_KEY}.{entry.name}")
    if key in optim:
        other = layers.places.get(at, ValueOrigin(layers.origin))
        if other.origin == place.origin and optim[key] != value:
            what = f"{entry.name} is {shown(value)}, and {other} {other.name or f'optim.{key}'} is {shown(optim[key])}"
            return [Problem(_where(layers, entry), what, "Remove one of them.")]
        if _height(other, layers) >= _height(place, layers):
            return []
    optim[key] = value
    for below in [each for each in layers.places if each[:2] == at]:
        del layers.places[below]
    layers.places[at] = place
    return []


def _height(place: ValueOrigin, layers: Layered) -> int:
    """The layer of a place: 0 the base, 1 the file, 2 ``--set``."""
    return {"--set": 2, layers.origin: 1}.get(place.origin, 0)


def _unknown(entry: Argument, optimizer: str, where: str) -> Problem:
    section = OPTIMIZERS[optimizer]
    fixed = [row.value for row in _fixed(entry.name, optimizer)]
    what = f"{optimizer} takes no {shown(entry.name)}"
    if fixed:
        what = f"{entry.name} of {optimizer} is always {' or '.join(fixed)}, got {shown(entry.value)}"
    owners = [name for name, each in OPTIMIZERS.items() if entry.name in each.arguments()]
    hint = f"{entry.name} is an argument of {' and '.join(owners)}." if owners else advice().get(entry.name, "")
    if entry.name in section.model_fields or entry.name == "lr":
        hint = f"Write optim.{'learning_rate' if entry.name == 'lr' else entry.name}."
    return Problem(where, what, f"{hint} It takes {', '.join(_taken(optimizer, section))}.".strip())


def _taken(optimizer: str, section: type[OptimSection]) -> list[str]:
    """The arguments of an optimizer, with the libraries' names for them."""
    other = {row.key: row.name for row in names().renamed if optimizer in row.optimizers}
    known = [f"{key} ({other[key]})" if key in other else key for key in section.arguments()]
    return known + [name for key, name in other.items() if key not in section.arguments()]
