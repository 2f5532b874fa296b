"""Converts nested values to settings with the line numbers of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lora_rocm.importing.setting import Setting, Value

MAX_SETTINGS = 20_000
MAX_DEPTH = 12


def settings_of(value: Value, text: str, file: str) -> list[Setting]:
    """Return the settings of a parsed file, with the line numbers of their keys.

    Args:
        value: the parsed content, with keys in the order of the file.
        text: text of the file, in which the keys are searched. A key precedes ``=`` or ``:`` and may be quoted.
        file: name of the file, stored in the settings.
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
"""Marks a key that only contains other keys."""


def _flat(value: Value, above: str, depth: int) -> Iterator[tuple[str, str, Value]]:
    """Yield (dotted key, last part of the key, value) in the order of the file.

    Sections have the value ``_SECTION``.
    """
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
    """Finds keys in a text, one after another."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._line = 0
        self._column = 0
        self._misses = 0

    def next_of(self, name: str) -> int:
        """Return the line number (from 1) of the next key with this name, or 0 if there is none.

        The next search continues after this key.
        """
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
"""Number of failed searches after which no more keys are searched.

A search fails if the text spells the key differently, for example with escapes. Each failure costs a pass over the
whole text.
"""
BEFORE_A_KEY = frozenset(" \t[{,.-\"'")
AFTER_A_KEY = re.compile(r"""["']?\s*(?:[=:\].]|$)""")


def _end_of_key(line: str, name: str, column: int) -> int:
    """Return the column after the next key with this name in a line; 0 if there is none."""
    at = line.find(name, column)
    while at >= 0:
        end = at + len(name)
        if (at == 0 or line[at - 1] in BEFORE_A_KEY) and AFTER_A_KEY.match(line, end):
            return end
        at = line.find(name, at + 1)
    return 0
