"""Recognise the files of other trainers by their keys (``foreign.toml``), if a user passes one as a recipe.

Nothing is executed, and no further file is read. The text is never longer than a recipe may be.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from lora_rocm.errors import Problem
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.foundation.tables import read_table
from lora_rocm.recipe.peer_names import peer_names
from lora_rocm.recipe.schema import Recipe

MAX_NAMED = 6
MAX_DEPTH = 6  # nesting of keys
MAX_KEYS = 20_000
MAX_DOTS = 1000  # in a line of TOML: the library is very slow for keys with many parts
ASSIGNMENT = re.compile(r"^\s*(?:export\s+|set\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=", re.MULTILINE)
USUAL_START = "sdxl.yaml"
NAMES_IN_OTHER_TRAINERS = "docs/reference/kohya-names.md"


@dataclass(frozen=True)
class ForeignTrainer:
    """Marks by which another trainer's file is recognised.

    Attributes:
        file: name of this kind of file, with an article.
        any_of: keys of which the file must have at least one.
        all_of: keys of which the file must have every one; ignored if empty.
    """

    file: str
    any_of: tuple[str, ...] = ()
    all_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignTable:
    """The content of ``foreign.toml``.

    Attributes:
        base_keys: keys that name the base model in other trainers' files.
        recipes: regular expression for "key=value" of a base key -> name of our recipe to start from.
        scripts: text in a file that is not a mapping -> name of this kind of file.
        trainer: marks of each kind of file; the first match is used.
    """

    base_keys: tuple[str, ...]
    recipes: Mapping[str, str]
    scripts: Mapping[str, str]
    trainer: tuple[ForeignTrainer, ...]


@cache
def _table() -> ForeignTable:
    return read_table(Path(__file__).with_name("foreign.toml"), ForeignTable)


def recognised(text: str, path: str, value: Any) -> Problem | None:
    """Return a problem if the file belongs to another trainer, or None for a recipe or an unknown file.

    Args:
        text: content of the file.
        path: path of the file, shown in the problem.
        value: content parsed as YAML (which includes JSON), or None if it is not YAML.
    """
    if _is_ours(value):
        return None
    data = value if isinstance(value, dict | list) else _mapping(text)
    paths = frozenset(islice(_paths(data), MAX_KEYS))
    names = paths if isinstance(data, list) else paths | {path.rpartition(".")[2] for path in paths}
    for trainer in _table().trainer:
        if names.intersection(trainer.any_of) or (trainer.all_of and names.issuperset(trainer.all_of)):
            return _problem(path, trainer.file, _renamed(paths), _start(data))
    if not isinstance(value, dict):
        for script, what in _table().scripts.items():
            if script in text:
                return _problem(path, what, "")
    return None


def _problem(path: str, what: str, renamed: str, start: str = USUAL_START) -> Problem:
    fix = f"Start from recipes/{start}. {renamed}All names: {NAMES_IN_OTHER_TRAINERS}."
    return Problem(path, f"this is {what}. lora-rocm cannot read it yet; an importer is planned", fix)


def _start(data: object) -> str:
    """Return the name of the shipped recipe that matches the base model in another trainer's file."""
    named = "\n".join(islice(_bases(data), MAX_KEYS)).lower()
    found = (recipe for pattern, recipe in _table().recipes.items() if re.search(pattern, named))
    return next(found, USUAL_START)


def _bases(data: object, depth: int = 0) -> Iterator[str]:
    """Yield "key=value" for each key in another trainer's file that names the base model."""
    if depth == MAX_DEPTH:
        return
    for name, value in data.items() if isinstance(data, dict) else ():
        if (key := str(name).lower().removeprefix("--")) in _table().base_keys and isinstance(value, str | bool):
            yield f"{key}={value}"
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _bases(value, depth + 1)


def _mapping(text: str) -> Any:
    """Return the parsed content of a JSON or TOML file or of KEY=VALUE lines, or None for any other file."""
    try:
        return parse_json(text, repeated_keys=True)
    except BadJson:
        pass
    if max(map(str.count, text.splitlines(), repeat(".")), default=0) <= MAX_DOTS:
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError):  # for example Windows paths with single backslashes
            pass
    return dict.fromkeys(ASSIGNMENT.findall(text)) or None


def _paths(data: Any, above: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the dotted keys of all nested mappings. A key ``--name``, as on a command line, is read as ``name``."""
    if depth == MAX_DEPTH:
        return
    if isinstance(data, dict):
        for name, value in data.items():
            path = above + str(name).lower().removeprefix("--")
            yield path
            yield from _paths(value, f"{path}.", depth + 1)
    elif isinstance(data, list):
        for item in data:
            yield from _paths(item, above, depth + 1)


def _is_ours(data: Any) -> bool:
    """Whether the data is meant as a recipe, even a wrong one: it has ``base`` or at least two of our sections."""
    if not isinstance(data, dict):
        return False
    sections = [name for name in data if name in Recipe.model_fields and isinstance(data[name], dict)]
    return "base" in data or len(sections) > 1


def _renamed(paths: frozenset[str]) -> str:
    found = {path.rpartition(".")[2] for path in paths}
    rows = [f"{name} is {key}" for name, key in peer_names().same_value.items() if name in found and "." in key]
    more = ", ..." if len(rows) > MAX_NAMED else ""
    return f"Of its keys, {', '.join(rows[:MAX_NAMED])}{more}. " if rows else ""
