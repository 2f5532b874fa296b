"""Prevents code in the current folder from running. Only this module builds the command of a Python child.

``python -m`` and ``python -c`` insert the current folder at the start of ``sys.path``. A ``torch.py`` next to a
downloaded recipe would then be imported in place of torch. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

PATH, SAFE_PATH = "PYTHONPATH", "PYTHONSAFEPATH"
NO_PROGRAMS_HERE = "NoDefaultCurrentDirectoryInExePath"
"""If this variable is unset, Windows searches the current folder for programs first (NeedCurrentDirectoryForExePathW).
"""


def python_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """The command of a Python child. ``multiprocessing`` passes ``-P`` on to the processes that the child spawns."""
    return [python, "-P", *arguments]


def python_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Python child, for libraries that start Python themselves with ``-m`` or ``-c``."""
    return {**without_current_folder(environ), SAFE_PATH: "1"}


def without_current_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without relative or empty entries of PYTHONPATH, which name the current folder."""
    kept = os.pathsep.join(entry for entry in environ.get(PATH, "").split(os.pathsep) if os.path.isabs(entry))
    others = {name: value for name, value in environ.items() if name != PATH}
    return {**others, PATH: kept} if kept else others


def forbid_programs_here() -> None:
    """Make this process and its children find programs in PATH only, not in the current folder (Windows)."""
    if sys.platform == "win32":
        os.environ[NO_PROGRAMS_HERE] = "1"
