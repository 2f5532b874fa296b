"""Settings of nested values, with the lines of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lora_rocm.importing.setting import Setting, Value

MAX_SETTINGS = 20_000
MAX_DEPTH = 12


def settings_of(value: Value, text: str, file: str) -> list[Setting]:
    """The settings of a parsed file. Their lines are found in its text: its keys have the order of ``value``.

    Args:
        value: the parsed content.
        text: of the file; keys are before ``=`` or ``:``, quoted or not.
        file: for the settings.
    """
    lines = _KeyLines(text)
    found = []
    for key, leaf, each in _flat(value, "", 0):
        line = lines.next_of(leaf)
        if each is not _SECTION:
            found.append(Setting(key, each, file, line))
        if len(found) == MAX_SETTINGS:
            break
    return found


_SECTION: Value = {"": None}
"""Marks a key that only leads to others."""


def _flat(value: Value, above: str, depth: int) -> Iterator[tuple[str, str, Value]]:
    """(dotted key, its last part, value) of each key in the order of the file; sections have ``_SECTION``."""
    if depth == MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            key = f"{above}.{name}" if above else str(name)
            if isinstance(each, Mapping) and each or _is_list_of_mappings(each):
                yield key, str(name), _SECTION
                yield from _flat(each, key, depth + 1)
            else:
                yield key, str(name), each
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _flat(each, f"{above}[{index}]", depth + 1)


def _is_list_of_mappings(value: Value) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


class _KeyLines:
    """Finds keys one after another in a text."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._line = 0
        self._column = 0
        self._misses = 0

    def next_of(self, name: str) -> int:
        """The line (from 1) of the next key with this name; the search goes on behind it. 0: there is none."""
        if not name or self._misses == MAX_MISSES:
            return 0
        column = self._column
        for number in range(self._line, len(self._lines)):
            end = _end_of_key(self._lines[number], name, column)
            if end:
                self._line, self._column = number, end
                return number + 1
            column = 0
        self._misses += 1
        return 0


MAX_MISSES = 100
"""Keys that are not in the text as they are, such as escaped ones, before the search ends: each costs a whole pass."""
BEFORE_A_KEY = frozenset(" \t[{,.-\"'")
AFTER_A_KEY = re.compile(r"""["']?\s*(?:[=:\].]|$)""")


def _end_of_key(line: str, name: str, column: int) -> int:
    """The end of the next key with this name in a line; 0 if there is none."""
    at = line.find(name, column)
    while at >= 0:
        end = at + len(name)
        if (at == 0 or line[at - 1] in BEFORE_A_KEY) and AFTER_A_KEY.match(line, end):
            return end
        at = line.find(name, at + 1)
    return 0
