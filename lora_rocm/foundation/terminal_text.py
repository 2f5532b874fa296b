"""Makes external text (device names, kernel log, variables) safe for a terminal. Imports only the standard library."""

from __future__ import annotations

import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Sequence

STEERING = frozenset(("Cc", "Cs", "Zl", "Zp"))  # control characters, lone surrogates, line and paragraph separators
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # reorder nearby text


def printable(text: str, keep: str = "") -> str:
    """Return the text with unprintable characters escaped, except those in ``keep``.

    Unprintable are controls, line ends and lone surrogates, among others.
    """
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def legible(text: str, keep: str = "") -> str:
    """Return the text with controls, line ends and bidirectional controls escaped, except those in ``keep``.

    For names in messages and files. Unlike ``printable`` it keeps invisible characters that are part of a visible
    one, such as the joiners in emoji.
    """
    return "".join(
        letter.encode("unicode_escape").decode("ascii") if _steers(letter) and letter not in keep else letter
        for letter in text
    )


def quoted(words: Sequence[str]) -> str:
    """Return a command line for this system's shell. Words are quoted if necessary."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def one_line(text: str) -> str:
    """Return the text on one line. Each run of white space and control characters becomes a single space."""
    return " ".join("".join(" " if _steers(letter) else letter for letter in text).split())


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) in STEERING or letter in TURNING
