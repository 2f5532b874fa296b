"""Makes text from outside (device names, kernel log, variables) safe for a terminal. Standard library only."""

from __future__ import annotations

import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Sequence

STEERING = frozenset(("Cc", "Cs", "Zl", "Zp"))  # control characters, lone surrogates, line and paragraph separators
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # reorder nearby text


def printable(text: str, keep: str = "") -> str:
    """Escape characters that are not printable (controls, line ends, lone surrogates), except those in ``keep``."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def legible(text: str, keep: str = "") -> str:
    """Escape control characters, line ends and bidirectional controls, except those in ``keep``.

    For names in messages and files. Unlike ``printable`` it keeps invisible characters that belong to others (joiners
    of emoji).
    """
    return "".join(
        letter.encode("unicode_escape").decode("ascii") if _steers(letter) and letter not in keep else letter
        for letter in text
    )


def quoted(words: Sequence[str]) -> str:
    """A command line for the shell of this system, with each word quoted if it needs it."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def one_line(text: str) -> str:
    """The text on one line; each run of white space or control characters becomes a single space."""
    return " ".join("".join(" " if _steers(letter) else letter for letter in text).split())


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) in STEERING or letter in TURNING
