"""Content of another trainer's file: settings with their locations, and lines that could not be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_rocm.foundation.terminal_text import one_line

Value = str | int | float | bool | None | list["Value"] | Mapping[str, "Value"]
"""A value of JSON, TOML or YAML."""

SECRET = re.compile(
    r"(?:^|[._-])(?:\w*token|\w*api[_-]?key|\w*password|\w*secret|\w*credentials?|\w*access_key(?:_id)?"
    r"|\w*webhook_url)$",
    re.IGNORECASE,
)
"""Matches names of keys with values that are never shown or written."""
SECRET_VALUE = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{16,}|gh[pousr]_\w{20,})\b"
    r"|(?:token|api[_-]?key|password|secret)[\"']?\s*[=:\s]\s*[\"']?[^\s\"',]*\w{16,}",
    re.IGNORECASE,
)
"""Matches secret values, under any key: tokens of Hugging Face, OpenAI and GitHub, and options with tokens."""
HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""Matches a key of Weights & Biases. A commit hash also matches."""
OF_A_COMMIT = re.compile(r"revision|commit|sha|hash|ref|version", re.IGNORECASE)
NOT_A_SECRET = re.compile(r"(?:max|new|keep|num|pad|eos|bos|special|add|class|trigger)_?\w*tokens?$|tokens?_\w+$", re.I)
MAX_SHOWN_LETTERS = 60


def is_secret_text(text: str, key: str = "") -> bool:
    """Whether a text contains a token or a key. ``key``: key of the setting that has this value."""
    is_hex = HEX_KEY.search(text) is not None and OF_A_COMMIT.search(key) is None
    return is_hex or SECRET_VALUE.search(text) is not None


@dataclass(frozen=True)
class Setting:
    """One key of another trainer's file.

    Attributes:
        key: the dotted key as written in the file. Items of a list of mappings have an index: ``datasets[0].path``.
        value: the parsed value. A mapping or a list of mappings is split into several settings, unless it is empty.
        file: path of the file, as written by the user or in another file; empty for a default of the trainer.
        line: line number from 1; 0 for a default or if unknown.
    """

    key: str
    value: Value
    file: str = ""
    line: int = 0

    @property
    def is_default(self) -> bool:
        """Whether this is the trainer's default, because no file contains the key."""
        return not self.file

    @property
    def is_secret(self) -> bool:
        named = SECRET.search(self.key) is not None and NOT_A_SECRET.search(self.key) is None
        return named or is_secret_text(str(self.value), self.key)

    @property
    def where(self) -> str:
        """Return the location as ``file:line``; empty for a default."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    @property
    def shown(self) -> str:
        """Return the value, shortened to one line. Secrets are never included."""
        if self.is_secret and self.value not in (None, "", False):
            return "***"
        text = one_line(str(self.value).lower() if isinstance(self.value, bool) else str(self.value))
        return text if len(text) <= MAX_SHOWN_LETTERS else f"{text[: MAX_SHOWN_LETTERS - 3]}..."


@dataclass(frozen=True)
class UnreadText:
    """A part of a file that could not be read.

    why: the reason, as a clause. changes_weights: whether the part may change the trained weights.
    """

    file: str
    line: int
    why: str
    changes_weights: bool = True


@dataclass
class FileContent:
    """Content of one file: its settings in order, and its unreadable parts."""

    settings: list[Setting] = field(default_factory=list)
    unread: list[UnreadText] = field(default_factory=list)

    def extend(self, other: FileContent) -> None:
        self.settings += other.settings
        self.unread += other.unread


def path_text(value: object) -> str:
    """Return a path as written in recipes: with slashes in place of a Windows path's backslashes. ``~`` is kept."""
    text = str(value).strip().strip('"')
    is_windows = re.match(r"[A-Za-z]:[\\/]|\\\\", text) is not None
    return text.replace("\\", "/") if is_windows or ("\\" in text and "/" not in text) else text


def named(path: Path) -> str:
    """Return a path as text for messages."""
    return one_line(str(path))
