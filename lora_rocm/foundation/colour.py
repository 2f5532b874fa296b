"""Colours for a terminal: only on a terminal, and never if ``NO_COLOR`` is set (https://no-color.org)."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

RESET, BOLD, RED, GREEN, CYAN = "\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[32m", "\x1b[36m"
HEADING = re.compile(r"^(?:[A-Z][^:\n]*:$|Usage:)", re.MULTILINE)
LABEL = re.compile(r"^ +(?:where|fix|code): ", re.MULTILINE)
CARET = re.compile(r"^( +\| *)(\^+)$", re.MULTILINE)
ENABLE_VIRTUAL_TERMINAL_PROCESSING = 0x4


def wants_colour(stream: TextIO) -> bool:
    """Whether text on this stream may be coloured."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)()) and _understands_colour(stream)


def _understands_colour(stream: TextIO) -> bool:
    """Whether the terminal interprets colours. A console of Windows does so after it was asked to."""
    if sys.platform != "win32":
        return True
    import ctypes
    import msvcrt

    try:
        handle = msvcrt.get_osfhandle(stream.fileno())
    except (OSError, ValueError):  # no file of the system
        return False
    mode = ctypes.c_ulong()
    kernel32 = ctypes.windll.kernel32
    if not kernel32.GetConsoleMode(ctypes.c_void_p(handle), ctypes.byref(mode)):
        return False
    wanted = mode.value | ENABLE_VIRTUAL_TERMINAL_PROCESSING
    return bool(kernel32.SetConsoleMode(ctypes.c_void_p(handle), wanted))


def coloured_error(text: str) -> str:
    """Return the text of an error with its first line, its labels and its carets in colour."""
    first, line_end, rest = text.partition("\n")
    rest = LABEL.sub(lambda found: f"{CYAN}{found[0]}{RESET}", rest)
    rest = CARET.sub(lambda found: f"{found[1]}{RED}{found[2]}{RESET}", rest)
    return f"{RED}{first}{RESET}{line_end}{rest}"


def help_for_terminal(text: str) -> str:
    """Return a help text, in colour if standard output is a terminal that wants it."""
    return coloured_help(text) if wants_colour(sys.stdout) else text


def coloured_help(text: str) -> str:
    """Return a help text with bold headings."""
    return HEADING.sub(lambda found: f"{BOLD}{found[0]}{RESET}", text)
