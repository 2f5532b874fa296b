"""Explains file names that are not valid text.

Such names cannot be written to JSON, YAML and reports, which are UTF-8.
"""

from __future__ import annotations

import os
from pathlib import Path

NOT_TEXT = "This name is not valid UTF-8, so the files of a run cannot contain it."


def fix_of_name(path: Path) -> str | None:
    """Return advice on a path that cannot be written to a text file; None if it can be written.

    Linux allows any bytes in file names. Python decodes invalid bytes to lone surrogates. In the locale C without
    UTF-8 mode, these are all bytes that are not ASCII.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        try:
            os.fsencode(path).decode("utf-8")
        except UnicodeError:  # also a surrogate that no byte gives
            return "Rename the file or folder, or use another one."
        return "The locale hides this name from Python: set PYTHONUTF8=1, or LC_ALL=C.UTF-8."
    return None
