"""Content of another trainer's file: settings with their locations, and lines that could not be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lora_rocm.foundation.terminal_text import one_line

Value = str | int | float | bool | None | list["Value"] | Mapping[str, "Value"]
"""A value of JSON, TOML or YAML."""

SECRET = re.compile(
    r"(?:^|[._-])(?:\w*token|\w*api[_-]?key|\w*password|\w*secret\w*|\w*credentials?|pwd|\w*_pwd|\w*access_key(?:_id)?"
    r"|\w*webhook(?:_url)?|\w*passwd|\w*passphrase|\w*authorization|\w*private_key|\w*cookies?|\w*_pass|\w*_pat"
    r"|(?:wandb|openai|hf|huggingface|comet|swanlab)_key|pw|bearer|token_hf|[\w ]* token|\w*api_keys|\w*passwords"
    r"|(?:hf|hub|huggingface|auth|access|api)_tokens?(?:_?\d+)?)$",
    re.IGNORECASE,
)
"""Matches names of keys with values that are never shown or written."""
SECRET_VALUE = re.compile(
    r"\b(?:hf|api_org|gh[pousr]|github_pat|glpat|gsk|npm|r8|xai|xox[abprs]|pypi|nvapi)[_-][\w-]{20,}"
    r"|\bsk-[\w-]{16,}|\bAKIA[0-9A-Z]{12,}\b|\bAIza[\w-]{20,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"
    r"|\bbearer\s+\S{16,}|://[^/\s:@]+:[^/\s@]+@|://[^/\s@]{16,}@"
    r"|[?&](?:sig|signature|key|auth|code|access_key)=[^&\s]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|(?:token|api[_-]?key|password|secret)[\"']?\s*[=:\s]\s*[\"']?[^\s\"',]*\w{16,}",
    re.IGNORECASE,
)
"""Matches secret values, under any key: tokens of known services, web addresses with passwords, private keys, and
options with secrets.
"""
NAMED_KEY = re.compile(r"(?:^|[._-])\w*(?:key|auth|login|signature)$", re.IGNORECASE)
"""Matches names of keys that may have a secret or, for example, the name of a column."""
KEY_VALUE = re.compile(r"(?=(?:\D*\d){3})[\w+/=.-]{16,}")
"""Matches a value that is a secret under such a name."""
RANDOM_WORD = re.compile(r"\b(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=(?:[A-Za-z]*\d+(?!\d)){4})[A-Za-z0-9]{24,}")
"""Matches a base64 or similar key under any name: letters of both cases with at least four numbers among them."""
HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""Matches a key of Weights & Biases. A commit hash also matches."""
OF_A_COMMIT = re.compile(r"revision|commit|sha|hash|ref|version", re.IGNORECASE)
NOT_A_SECRET = re.compile(
    r"(?:max|new|keep|num|pad|eos|bos|unk|cls|sep|mask|image|video|audio|special|add|class|trigger|placeholder|initializer"
    r"|instance|start|stop|begin|end|tool|think)_?\w*tokens?$|tokens?_(?!hf$)\w+$",
    re.IGNORECASE,
)
"""Matches names of keys for tokens of a tokenizer."""
HIDDEN = "***"
"""Shown in place of a secret."""
MAX_SHOWN_LETTERS = 60
MAX_READ_LETTERS = 1 << 14
"""Letters of a value of which the shown ones are a part: white space counts once."""


SECRET_SECTION = re.compile(r"^(?:\w*_)?(?:secrets?|credentials?|passwords?)$", re.IGNORECASE)
"""Matches names of sections in which every value is a secret."""


def names_secret(key: str) -> bool:
    """Whether a key of this name, or in a section of this name, has a secret value."""
    *sections, name = (part.partition("[")[0] for part in key.split("."))
    if SECRET.search(name) is not None and NOT_A_SECRET.search(name) is None:
        return True
    return any(
        SECRET_SECTION.search(each) or (SECRET.search(each) and not NOT_A_SECRET.search(each)) for each in sections
    )


def is_secret_text(text: str, key: str = "") -> bool:
    """Whether a text contains a token or a key. ``key``: key of the setting that has this value."""
    may_be_hash = OF_A_COMMIT.search(key) is not None
    is_random = any(pattern.search(text) is not None for pattern in (HEX_KEY, RANDOM_WORD)) and not may_be_hash
    is_named = NAMED_KEY.search(key) is not None and KEY_VALUE.fullmatch(text) is not None
    return is_random or is_named or SECRET_VALUE.search(text) is not None


@dataclass(frozen=True)
class Setting:
    """One key of another trainer's file.

    Attributes:
        key: the dotted key as written in the file. Items of a list of mappings have an index: ``datasets[0].path``.
        value: the parsed value. A mapping or a list of mappings is split into several settings, unless it is empty.
        file: path of the file, as written by the user or in another file; empty for a default of the trainer.
        line: line number from 1; 0 for a default or if unknown.
        has_known_secret: whether the value contains one that also reaches a secret key (``known_secrets.py``).
    """

    key: str
    value: Value
    file: str = ""
    line: int = 0
    has_known_secret: bool = False

    @property
    def is_default(self) -> bool:
        """Whether this is the trainer's default, because no file contains the key."""
        return not self.file

    @cached_property
    def is_secret(self) -> bool:
        if self.has_known_secret or is_secret_text(str(self.value), self.key):
            return True
        return names_secret(self.key) and self.value is not None and not isinstance(self.value, bool)

    @property
    def where(self) -> str:
        """Return the location as ``file:line``; empty for a default."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    @cached_property
    def shown(self) -> str:
        """Return the value, shortened to one line. Secrets are never included."""
        if self.is_secret and self.value not in (None, "", False):
            return HIDDEN
        text = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        text = one_line(text[:MAX_READ_LETTERS])
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
    """Content of one file: its settings in order, its unreadable parts, and secrets that were found elsewhere in it."""

    settings: list[Setting] = field(default_factory=list)
    unread: list[UnreadText] = field(default_factory=list)
    secrets: list[Value] = field(default_factory=list)

    def extend(self, other: FileContent) -> None:
        self.settings += other.settings
        self.unread += other.unread
        self.secrets += other.secrets

    def with_settings(self, settings: list[Setting]) -> FileContent:
        """Return the content with other settings in place of the present ones. Secrets among these stay known."""
        secrets = [each.value for each in self.settings if names_secret(each.key)]
        return FileContent(settings, self.unread, [*self.secrets, *secrets])


ESCAPED = str.maketrans({"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v"})


def path_text(value: object) -> str:
    r"""Return a path as written in recipes: with slashes in place of a Windows path's backslashes. ``~`` is kept.

    A parser of JSON reads "C:\new" with an escape. Paths contain no such characters, so they become backslashes again.
    """
    text = str(value).strip().strip('"')
    text = text.translate(ESCAPED) if re.match(r"[A-Za-z]:[\\/\x07-\x0d]", text) is not None else text
    is_windows = re.match(r"[A-Za-z]:[\\/]|\\\\", text) is not None
    return text.replace("\\", "/") if is_windows or ("\\" in text and "/" not in text) else text


def named(path: Path) -> str:
    """Return a path as text for messages."""
    return one_line(str(path))
