"""JSON that is cut off or damaged in places: its readable parts with their keys, and the lines of the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.setting import Value

TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|[{}\[\]:,]|[^\s{}\[\]:,"]+|"')
MAX_OPEN = 100
CLOSED_BY: Mapping[str, type[dict[str, Value]] | type[list[Value]]] = {"}": dict, "]": list}
CUT = "the file ends before this list does"
DAMAGED = "cannot be read, and the file is damaged"


@dataclass(frozen=True)
class _Token:
    text: str
    line: int

    @property
    def is_string(self) -> bool:
        return len(self.text) > 1 and self.text[0] == '"'


@dataclass
class _Open:
    """An object or list that is not closed yet. ``key``: of the next value; None if there is none."""

    value: dict[str, Value] | list[Value]
    line: int
    key: str | None = None


@dataclass
class JsonParts:
    """The readable parts of a damaged text.

    Attributes:
        value: the content; empty if nothing could be read.
        unread: (line, reason) of what could not be read.
    """

    value: dict[str, Value] | list[Value] = field(default_factory=dict)
    unread: list[tuple[int, str]] = field(default_factory=list)


def readable_parts(text: str) -> JsonParts:
    """Read what can be read. After damage the next line is read on."""
    found, stack, skipped = JsonParts(), list[_Open](), 0
    tokens = [*_tokens(text)]
    for place, token in enumerate(tokens):
        if token.line == skipped and token.text not in CLOSED_BY:
            continue
        following = tokens[place + 1].text if place + 1 < len(tokens) else ""
        if not _take(token, following, stack, found):
            found.unread.append((token.line, DAMAGED))
            skipped = token.line
    # a list that is cut off may lack items, so it is not taken
    for opened in reversed(stack):
        if isinstance(opened.value, list) and not any(isinstance(each, dict) for each in opened.value):
            found.unread.append((opened.line, CUT))
            _drop(found.value, opened.value)
    found.unread.sort()
    return found


def _tokens(text: str) -> Iterator[_Token]:
    line, at = 1, 0
    for match in TOKEN.finditer(text):
        line, at = line + text.count("\n", at, match.start()), match.start()
        if not match[0].startswith("//"):
            yield _Token(match[0], line)


def _take(token: _Token, following: str, stack: list[_Open], found: JsonParts) -> bool:
    """Read one token; returns False if it is damaged. ``following``: the next one."""
    if token.text in CLOSED_BY:
        _close(stack, CLOSED_BY[token.text])
        return True
    if token.text in ("{", "["):
        return _open(token, stack, found)
    if not stack:
        return False
    inner = stack[-1]
    if token.text == ",":
        return inner.key is None
    if token.text == ":":
        return inner.key is not None
    is_key = isinstance(inner.value, dict) and inner.key is None
    if is_key and not (token.is_string and following == ":"):
        return False
    try:
        value = _parsed(token.text)
    except BadJson:
        inner.key = None
        return False
    if is_key:
        inner.key = str(value)
    else:
        _add(inner, value)
    return True


def _parsed(text: str) -> Value:
    """The value of a scalar. A string with an escape that JSON does not have is usually a Windows path: as written."""
    value: Value
    try:
        value = parse_json(text)
    except BadJson:
        value = parse_json(text.replace("\\", "\\\\").replace('\\\\"', '\\"'))
    return value


def _open(token: _Token, stack: list[_Open], found: JsonParts) -> bool:
    value: dict[str, Value] | list[Value] = {} if token.text == "{" else []
    if not stack:
        found.value = value
    elif len(stack) == MAX_OPEN or (isinstance(stack[-1].value, dict) and stack[-1].key is None):
        return False
    else:
        _add(stack[-1], value)
    stack.append(_Open(value, token.line))
    return True


def _add(inner: _Open, value: Value) -> None:
    if isinstance(inner.value, list):
        inner.value.append(value)
    else:
        assert inner.key is not None
        inner.value[inner.key], inner.key = value, None


def _close(stack: list[_Open], kind: type[dict[str, Value]] | type[list[Value]]) -> None:
    """Close the innermost object or list of this kind, and those inside it; one that nobody opened is ignored."""
    if any(isinstance(opened.value, kind) for opened in stack[1:]):
        while not isinstance(stack.pop().value, kind):
            pass


def _drop(value: Value, gone: list[Value]) -> None:
    """Remove a list, by identity, from the content."""
    if isinstance(value, dict):
        for name in [name for name, each in value.items() if each is gone]:
            del value[name]
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(each, dict | list):
            _drop(each, gone)
