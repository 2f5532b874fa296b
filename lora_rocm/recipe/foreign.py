"""Recognise the files of other trainers by their keys (``foreign.toml``), if a user passes one as a recipe.

Nothing is executed, and no further file is read. The text is never longer than a recipe may be.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from lora_rocm.errors import Problem
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.foundation.tables import read_table
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, parse_yaml

MAX_DEPTH = 6  # nesting of keys
MAX_KEYS = 20_000
MAX_DOTS = 1000  # in a line of TOML: the library is very slow for keys with many parts
ASSIGNMENT = re.compile(r"^\s*(?:export\s+|set\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=", re.MULTILINE)
TOP_YAML_KEY = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*):(?:\s|$)", re.MULTILINE)
CODE = re.compile(r"""^[ \t"]*(?:from [\w.]+ )?import \w|"cell_type\"""", re.MULTILINE)
"""Matches a line of Python, or a notebook."""
JSON_KEY = re.compile(r'"([A-Za-z_][\w.]*)"\s*:')
YAML_KEY = re.compile(r"""^\s*(?:- )?["']?([A-Za-z_]\w*)["']?\s*:""", re.MULTILINE)
TOML_HEADER = re.compile(r"^\s*\[{1,2}\s*([\w.-]+)\s*\]{1,2}", re.MULTILINE)
USUAL_START = "sdxl.yaml"
NAMES_IN_OTHER_TRAINERS = "docs/reference/kohya-names.md"


@dataclass(frozen=True)
class ForeignTrainer:
    """Marks by which another trainer's file is recognised.

    Attributes:
        file: name of the kind of file, with an article.
        trainer: id of the trainer for ``lora-rocm import``; empty if it cannot import the file.
        any_of: the file must have at least one of these keys.
        all_of: the file must have all of these keys; ignored if empty.
    """

    file: str
    trainer: str = ""
    any_of: tuple[str, ...] = ()
    all_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignScript:
    """A script with another trainer's command line.

    Attributes:
        text: a part of the script.
        file: name of the kind of file, with an article.
        trainer: see ``ForeignTrainer``.
    """

    text: str
    file: str
    trainer: str = ""


@dataclass(frozen=True)
class ForeignTable:
    """The content of ``foreign.toml``.

    Attributes:
        script: marks of files that are not mappings.
        trainer: marks of each kind of file; the first match counts.
    """

    script: tuple[ForeignScript, ...]
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
    found = _foreign(text, data)
    if found is None:
        return None
    if found.trainer:
        fix = f"Convert it: {quoted(['lora-rocm', 'import', path, '--output', 'my-recipe.yaml'])}"
        return Problem(path, f"this is {found.file}", fix)
    fix = f"Start from recipes/{USUAL_START}. Names in other trainers: {NAMES_IN_OTHER_TRAINERS}."
    return Problem(path, f"this is {found.file}, which lora-rocm cannot import", fix)


def trainer_in(text: str) -> str | None:
    """Return the id of the trainer to which a configuration file belongs; None for a recipe or an unknown file."""
    try:
        value = parse_yaml(text).value
    except YamlSyntaxError:
        value = None
    if _is_ours(value):
        return None
    found = _foreign(text, value if isinstance(value, dict | list) else _mapping(text))
    if found is None and value is None:  # damaged YAML
        found = _foreign(text, dict.fromkeys(YAML_KEY.findall(text)))
    return found.trainer or None if found is not None else None


def _foreign(text: str, data: object) -> ForeignTrainer | ForeignScript | None:
    """Return the first known kind of file with marks that occur in a file.

    ``data``: content of the file; None if it is not a mapping.
    """
    paths = frozenset(islice(_paths(data), MAX_KEYS))
    names = paths if isinstance(data, list) else paths | {path.rpartition(".")[2] for path in paths}
    scripts = (script for script in _table().script if script.text in text)
    trainers = (
        trainer
        for trainer in _table().trainer
        if names.intersection(trainer.any_of) or (trainer.all_of and names.issuperset(trainer.all_of))
    )
    if CODE.search(text):  # names of a script are its own
        return next(scripts, None) or next(trainers, None)
    return next(trainers, None) or next(scripts, None)


def _mapping(text: str) -> Any:
    """Return the content of a JSON or TOML file as a mapping; None for any other file.

    Of a damaged file, and of lines such as KEY=VALUE, only the keys are returned.
    """
    try:
        return parse_json(text, repeated_keys=True)
    except BadJson:
        pass
    if max(map(str.count, text.splitlines(), repeat(".")), default=0) <= MAX_DOTS:
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError):  # for example Windows paths with single backslashes
            pass
    if text.lstrip()[:1] == "{":
        return dict.fromkeys(JSON_KEY.findall(text)) or None
    return dict.fromkeys([*_keys_by_lines(text), *TOP_YAML_KEY.findall(text)]) or None


def _keys_by_lines(text: str) -> Iterator[str]:
    """Yield the sections and keys of a damaged TOML file, each key both with and without its section."""
    above = ""
    for line in text.splitlines():
        if (header := TOML_HEADER.match(line)) is not None:
            parts = header[1].split(".")[:MAX_DEPTH]
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
            above = ".".join([*parts, ""])
        elif (found := ASSIGNMENT.match(line)) is not None:
            yield from (found[1], above + found[1])


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
    """Whether the data is meant as a recipe, even if it has errors: it has ``base``, or at least two of our sections.

    Unsloth's files have sections of the same names, but the name of the model in place of a section.
    """
    if not isinstance(data, dict):
        return False
    sections = [name for name in data if name in Recipe.model_fields and isinstance(data[name], dict)]
    return "base" in data or (len(sections) > 1 and not isinstance(data.get("model"), str))
