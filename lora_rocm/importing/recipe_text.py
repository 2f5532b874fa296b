"""Writes a recipe in which a comment on each line names the origin of the value."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.importing.translator import RecipeValue
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.suggest import all_keys

PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
COMMENT_COLUMN = 44
FIRST = ("data.path", "data.sources", "optim.optimizer", "lora.type")
"""Keys that come first in their section. All other keys are in the order of the schema."""
MAX_COMMENT_LETTERS = 160


def recipe_text(values: Mapping[str, RecipeValue], head: Sequence[str] = ()) -> str:
    """Return the recipe as YAML, in the order of the schema.

    Args:
        values: maps dotted keys to values. Keys of list items have indices.
        head: lines of the comment at the top.
    """
    root = CommentedMap()
    order = {key: number for number, key in enumerate(all_keys(Recipe))}
    last = len(order)

    def rank(key: str) -> tuple[int, int]:
        section = order.get(key.partition(".")[0].partition("[")[0], last)
        plain = re.sub(r"\[\d+\].*", "", key)
        return section, order.get(plain, last) if plain not in FIRST else -1

    numbers = _list_numbers(values)
    for key in sorted(values, key=rank):  # stable: list items keep their order
        _place(root, key, values[key], numbers)
    for name in list(root)[1:]:
        root.yaml_set_comment_before_after_key(name, before="\n")
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(root, stream)
    top = "".join(f"# {one_line(line)}".rstrip() + "\n" for line in head)
    body = re.sub(r"^# *$\n?", "\n", stream.getvalue(), flags=re.MULTILINE)
    return f"{top}\n{body}" if top else body


def _list_numbers(values: Mapping[str, RecipeValue]) -> dict[str, int]:
    """Map the key of each list item to its position. Removed items leave no gap."""
    found: dict[str, int] = {}
    for item in sorted({key[: each.end()] for key in values for each in re.finditer(r"\[\d+\]", key)}, key=_by_index):
        list_key = item[: item.rindex("[")]
        found[item] = sum(1 for each in found if each[: each.rindex("[")] == list_key)
    return found


def _by_index(item: str) -> tuple[str, int]:
    at = item.rindex("[")
    return item[:at], int(item[at + 1 : -1])


def _place(root: CommentedMap, key: str, given: RecipeValue, numbers: Mapping[str, int]) -> None:
    """Write one value, with its comment, into the nested mappings. ``numbers``: positions of the list items."""
    parts: list[str | int] = [
        found[1] if found[1] is not None else numbers[key[: found.end()]] for found in PART.finditer(key)
    ]
    at: Any = root
    for part, following in pairwise(parts):
        new = CommentedSeq() if isinstance(following, int) else CommentedMap()
        if isinstance(at, CommentedSeq):
            assert isinstance(part, int)
            while len(at) <= part:
                at.append(CommentedSeq() if isinstance(following, int) else CommentedMap())
            at = at[part]
        else:
            at = at.setdefault(part, new)
    leaf = parts[-1]
    value = _plain(given.value)
    if isinstance(at, CommentedSeq):
        assert isinstance(leaf, int) and leaf == len(at), "items are written in their order"
        at.append(value)
    else:
        at[leaf] = value
    is_later_item = isinstance(leaf, int) and leaf > 0  # the first item has the comment of all
    if (comment := _comment(given)) and not is_later_item:
        at.yaml_add_eol_comment(comment, leaf, column=COMMENT_COLUMN)


def _plain(value: Any) -> Any:
    """Prepare a value for the YAML writer, so that short lists of scalars stay on one line."""
    if isinstance(value, Mapping):
        return CommentedMap({key: _plain(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        listed = CommentedSeq([_plain(each) for each in value])
        if not any(isinstance(each, Mapping | list | str) for each in value):
            listed.fa.set_flow_style()
        return listed
    return value


def _comment(given: RecipeValue) -> str:
    """Return the comment for a value: ``key = value (file:line)`` for each setting, followed by the note."""
    files = [f"{setting.key} = {setting.shown}{_place_of(setting.where)}" for setting in given.settings[:2]]
    defaults = [f"its default: {setting.key} = {setting.shown}" for setting in given.settings[:2] if setting.is_default]
    parts = [*defaults, *(text for text, setting in zip(files, given.settings, strict=False) if not setting.is_default)]
    if given.note:
        parts.append(given.note)
    text = one_line("; ".join(parts))
    return text if len(text) <= MAX_COMMENT_LETTERS else f"{text[: MAX_COMMENT_LETTERS - 3]}..."


def _place_of(where: str) -> str:
    return f" ({where})" if where else ""
