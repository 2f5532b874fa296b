"""File names that are not text: JSON, YAML and reports, which hold paths, are UTF-8."""

from __future__ import annotations

import os
from pathlib import Path

NOT_TEXT = "This name is not text (UTF-8), and files of a run hold it."


def fix_of_name(path: Path) -> str | None:
    """What to do about a path that cannot be written to a text file; None: it can be.

    Python gives bytes that its encoding of file names does not know as lone surrogates. On Linux a name may hold any
    bytes; and in the locale C without UTF-8 mode, every letter beyond ASCII is unknown.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        try:
            os.fsencode(path).decode("utf-8")
        except UnicodeError:  # also a surrogate that stands for no byte
            return "Rename the file or folder, or use another one."
        return "The locale hides this name from Python: set PYTHONUTF8=1, or LC_ALL=C.UTF-8."
    return None
