"""Prevents Python from importing modules in the current folder. No other module builds commands of Python processes.

``python -m`` and ``python -c`` insert the current folder at the start of ``sys.path``. A ``torch.py`` next to a
downloaded recipe would then be imported in place of torch. This module imports only the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

PATH, SAFE_PATH = "PYTHONPATH", "PYTHONSAFEPATH"
NO_PROGRAMS_HERE = "NoDefaultCurrentDirectoryInExePath"
"""Unless this variable is set, Windows searches the current folder for programs first
(NeedCurrentDirectoryForExePathW).
"""


def python_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command of a Python process. ``multiprocessing`` passes ``-P`` on to the processes that it starts."""
    return [python, "-P", *arguments]


def python_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a Python process.

    With it, processes that libraries start with ``-m`` or ``-c`` do not import from the current folder, either.
    """
    return {**without_current_folder(environ), SAFE_PATH: "1"}


def without_current_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with PYTHONPATH reduced to absolute paths.

    Relative and empty entries mean the current folder.
    """
    kept = os.pathsep.join(entry for entry in environ.get(PATH, "").split(os.pathsep) if os.path.isabs(entry))
    others = {name: value for name, value in environ.items() if name != PATH}
    return {**others, PATH: kept} if kept else others


def forbid_programs_here() -> None:
    """Make this process and its children search for programs only in PATH, not in the current folder (Windows)."""
    if sys.platform == "win32":
        os.environ[NO_PROGRAMS_HERE] = "1"
