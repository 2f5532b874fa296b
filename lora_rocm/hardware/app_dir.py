"""Location of the program's own folder for kernel caches and stored knowledge about this machine.

Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "LORA_ROCM_HOME"


def app_dir(environ: Mapping[str, str], system: str) -> Path:
    """Return the folder of this user's caches. ``LORA_ROCM_HOME`` overrides it. The folder is not created."""
    own = environ.get(VARIABLE)
    if own:
        return Path(own)
    home = Path(environ.get("USERPROFILE" if system == "windows" else "HOME") or os.path.expanduser("~"))
    if system == "windows":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "lora-rocm"
    if system == "macos":
        return home / "Library" / "Caches" / "lora-rocm"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "lora-rocm"


def own_app_dir() -> Path:
    """Return ``app_dir`` for this machine and environment."""
    return app_dir(os.environ, {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux"))
