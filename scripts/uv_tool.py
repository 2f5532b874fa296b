"""The package resolver uv in a separate folder, for scripts that need different versions than ``.venv`` has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UV = "uv==0.13.9"


def program(venv: Path, name: str) -> str:
    """A program of a virtual environment."""
    return str(venv / (f"Scripts/{name}.exe" if os.name == "nt" else f"bin/{name}"))


def install_uv(folder: Path) -> str:
    """Make an environment in a folder with uv in it; the program.

    Raises:
        subprocess.CalledProcessError: it cannot be installed; pip has printed why.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [program(folder, "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", UV]
    subprocess.run(command, check=True, env={**os.environ, "PIP_USER": "0"})
    return program(folder, "uv")
