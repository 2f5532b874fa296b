"""The English texts of the page, in ``texts.toml``. Templates and handlers name them by key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("texts.toml")


class UnknownTextError(LookupError):
    """A template or a handler names a text that ``texts.toml`` does not have."""


@cache
def texts() -> Mapping[str, str]:
    """Return all texts by key, such as "start.title"."""
    return dict(_flat(tomllib.loads(FILE.read_text(encoding="utf-8"))))


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def phase_words(name: str) -> str:
    """Return what a phase or an activity of a run does, in words. A name of another version is returned as it is."""
    return t(f"phase.{name}") if f"phase.{name}" in texts() else name


def t(key: str, /, **values: object) -> str:
    """Return the text with this key. ``values`` replace its placeholders.

    Raises:
        UnknownTextError: there is no such text.
    """
    text = texts().get(key)
    if text is None:
        raise UnknownTextError(f"texts.toml has no text {key!r}")
    return text.format(**values) if values else text
