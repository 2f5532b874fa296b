"""Replace ``optim.optimizer_args`` (kohya's optimizer arguments) by the typed keys of the optimizer.

Afterwards the recipe has only typed keys. They are validated, saved with the run and compared on a resume.
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
    """An argument that some optimizers name differently from our key in ``optim``."""

    name: str
    key: str
    optimizers: tuple[str, ...]


@dataclass(frozen=True)
class Unset:
    """A value of a key that has the same meaning as an unset key."""

    key: str
    value: str


@dataclass(frozen=True)
class Fixed:
    """An argument that has no key because its value never changes. optimizers: those it applies to; empty for all."""

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
    """Return the tables of ``optimizer_args.toml``. See ``read_table`` for errors."""
    return read_table(Path(__file__).with_name("optimizer_args.toml"), OptimizerArgTables)


@dataclass(frozen=True)
class Argument:
    """One entry of ``optim.optimizer_args``. part: its list index, or its name in a mapping."""

    name: str
    value: object
    part: str | int


def resolve_arguments(layers: Layered) -> list[Problem]:
    """Replace ``optim.optimizer_args`` by typed keys. A key set in a higher layer takes precedence.

    If the optimizer is unknown, nothing changes: its name is already reported, and its arguments are not known.

    Args:
        layers: all layers of a recipe before validation; changed in place.

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
    where, whole = layers.where(ARGUMENTS), (dotted(ARGUMENTS),)
    if not isinstance(given, list | dict):
        problems.append(Problem(where, f"expected a list or a mapping, got {shown(given)}", EXAMPLE, keys=whole))
    elif len(given) > MAX_ITEMS:
        problems.append(Problem(where, f"has more than {MAX_ITEMS} items", EXAMPLE, keys=whole))
    elif isinstance(given, dict):
        yield from (Argument(name, _read(value), name) for name, value in given.items())
    else:
        for index, text in enumerate(given):
            if isinstance(text, str) and "=" in text:
                name, _, value = text.partition("=")
                yield Argument(name.strip(), _read(value.strip()), index)
            else:
                place = layers.where((*ARGUMENTS, index))
                what = f"expected name=value, got {shown(text)}"
                problems.append(Problem(place, what, EXAMPLE, keys=(dotted((*ARGUMENTS, index)),)))


def _read(value: object) -> object:
    """Parse text as a Python literal, as kohya does. ``true``, ``none`` and ``inf`` are accepted in any case."""
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
    """Return the key of ``optim`` that an entry sets; empty if the optimizer has no such key."""
    if entry.name in OPTIMIZERS[optimizer].arguments():
        return entry.name
    rows = (row for row in names().renamed if row.name == entry.name and optimizer in row.optimizers)
    return next((row.key for row in rows), "")


def _fixed(name: str, optimizer: str) -> list[Fixed]:
    return [row for row in names().fixed if row.name == name and optimizer in (row.optimizers or OPTIMIZERS)]


def _keys(entry: Argument) -> tuple[str]:
    return (dotted((*ARGUMENTS, entry.part)),)


def _where(layers: Layered, entry: Argument) -> str:
    """Return where an entry was given and its name, for a message."""
    return f"{_place(layers, entry)} {dotted((*ARGUMENTS, entry.part))}"


def _place(layers: Layered, entry: Argument) -> ValueOrigin:
    at: Key = (*ARGUMENTS, entry.part)
    near = next((at[:n] for n in range(len(at), 0, -1) if at[:n] in layers.places), None)
    return layers.places[near] if near else ValueOrigin(layers.origin)


def _set_key(optim: dict[str, object], key: str, entry: Argument, layers: Layered) -> list[Problem]:
    """Set a key, unless a higher layer sets it. Return a problem if the same layer sets another value."""
    value = None if any((row.key, _read(row.value)) == (key, entry.value) for row in names().unset) else entry.value
    at, place = ("optim", key), replace(_place(layers, entry), name=f"optim.{ARGUMENTS_KEY}.{entry.name}")
    if key in optim:
        other = layers.places.get(at, ValueOrigin(layers.origin))
        if other.origin == place.origin and optim[key] != value:
            what = f"{entry.name} is {shown(value)}, and {other} {other.name or f'optim.{key}'} is {shown(optim[key])}"
            return [Problem(_where(layers, entry), what, "Remove one of them.", keys=_keys(entry))]
        if _height(other, layers) >= _height(place, layers):
            return []
    optim[key] = value
    for below in [each for each in layers.places if each[:2] == at]:
        del layers.places[below]
    layers.places[at] = place
    return []


def _height(place: ValueOrigin, layers: Layered) -> int:
    """Return the number of the layer in which a value was given: 0 for the base, 1 for the file, 2 for ``--set``."""
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
    fix = f"{hint} It takes {', '.join(_taken(optimizer, section))}.".strip()
    return Problem(where, what, fix, keys=_keys(entry))


def _taken(optimizer: str, section: type[OptimSection]) -> list[str]:
    """Return the names of an optimizer's arguments, including the libraries' names for them."""
    other = {row.key: row.name for row in names().renamed if optimizer in row.optimizers}
    known = [f"{key} ({other[key]})" if key in other else key for key in section.arguments()]
    return known + [name for key, name in other.items() if key not in section.arguments()]
