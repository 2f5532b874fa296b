"""Converts TOML, JSON and YAML to settings.

In a damaged file, readable parts are used and all others are listed by line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import cast

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.formats.tree import settings_of
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, Value
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, dotted, parse_yaml

MAX_DOTS = 1000  # in a line of TOML: the library is very slow for keys with many parts
SECTION = re.compile(r"^\s*\[+\s*([\w.\"'-]+)\s*\]+\s*(?:#.*)?$")
JSON_PAIR = re.compile(r'^\s*[\[{,]*\s*"([^"]+)"\s*:\s*(.+?)\s*,?\s*$')
COMMENT_OR_EMPTY = re.compile(r"^\s*(?:#.*)?$")


def toml_settings(text: str, file: str) -> FileContent:
    """Return the settings of a TOML text.

    If it is damaged, return those from lines that are complete key-value pairs.
    """
    try:
        if max((line.count(".") for line in text.splitlines()), default=0) > MAX_DOTS:
            raise ValueError("a key has too many parts")
        return FileContent(settings_of(cast(Value, tomllib.loads(text)), text, file))
    except (ValueError, RecursionError):
        return _toml_by_lines(text, file)


def json_settings(text: str, file: str) -> FileContent:
    """Return the settings of a JSON text.

    If it is damaged, return those from lines that are complete key-value pairs.
    """
    try:
        return FileContent(settings_of(cast(Value, parse_json(text, repeated_keys=True)), text, file))
    except BadJson:
        return _by_lines(text, file, _json_pair)


def yaml_settings(text: str, file: str) -> FileContent:
    """Return the settings of a YAML text. If it is damaged, return those above the first damaged line."""
    lines, found = text.splitlines(), FileContent()
    while True:
        try:
            tree = parse_yaml("\n".join(lines) + "\n")
            break
        except YamlSyntaxError as error:
            kept = min(max(error.line - 1, 0), len(lines) - 1)
            found.unread[:0] = [
                UnreadText(file, kept + number, "is not valid YAML" if number == 1 else "is below a damaged line")
                for number, line in enumerate(lines[kept:], 1)
                if not COMMENT_OR_EMPTY.match(line)
            ]
            lines = lines[:kept]
    found.unread += [UnreadText(file, line, f"{dotted(key)}: {what}") for key, line, what, _ in tree.problems]
    value = cast(Value, tree.value)
    found.settings = settings_of(value, "\n".join(lines), file) if isinstance(value, dict | list) else []
    return found


def _toml_by_lines(text: str, file: str) -> FileContent:
    """Return the settings of a damaged TOML text.

    Each line is parsed separately, in the section of the last header above it.
    """
    above = ""

    def pair(line: str) -> tuple[str, Value] | None:
        nonlocal above
        if (header := SECTION.match(line)) is not None:
            above = header[1]
            return None
        if line.count(".") > MAX_DOTS:
            raise ValueError("a key has too many parts")
        try:
            parsed = tomllib.loads(line)
        except ValueError:  # usually a Windows path with single backslashes
            parsed = tomllib.loads(re.sub(r'"((?:[^"\\]|\\.)*)"', _literal, line))
        ((name, value),) = parsed.items()
        return (f"{above}.{name}" if above else name), cast(Value, value)

    return _by_lines(text, file, pair)


def _literal(found: re.Match[str]) -> str:
    """Convert a basic TOML string to a literal string, so that its backslashes stay backslashes."""
    return found[0] if "'" in found[1] else f"'{found[1]}'"


def _json_pair(line: str) -> tuple[str, Value] | None:
    found = JSON_PAIR.match(line)
    if found is None:
        if line.strip(" \t{}[],"):
            raise ValueError
        return None
    value = found[2]
    if value in ("{", "["):
        return None
    return found[1], cast(Value, parse_json(value))


def _by_lines(text: str, file: str, pair: Callable[[str], tuple[str, Value] | None]) -> FileContent:
    """Return the settings of all lines that ``pair`` can parse. ``pair`` raises ValueError for the other lines."""
    found = FileContent()
    for number, line in enumerate(text.splitlines(), 1):
        if COMMENT_OR_EMPTY.match(line):
            continue
        try:
            setting = pair(line)
        except (ValueError, BadJson, RecursionError):
            found.unread.append(UnreadText(file, number, "cannot be read on its own, and the file is damaged"))
            continue
        if setting is not None:
            found.settings.append(Setting(*setting, file, number))
    return found
