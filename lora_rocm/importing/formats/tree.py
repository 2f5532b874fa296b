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

    def next_of(self, name: str) -> int:
        """The line (from 1) of the next key of this name; the search goes on behind it. 0: there is none."""
        key = re.compile(rf"""(?:^|[\s\[{{,.\-"'])(?:"|')?{re.escape(name)}(?:"|')?\s*(?:[=:\].]|$)""")
        column = self._column
        for number in range(self._line, len(self._lines)):
            found = key.search(self._lines[number], column)
            if found is not None:
                self._line, self._column = number, max(found.end() - 1, 0)
                return number + 1
            column = 0
        return 0
