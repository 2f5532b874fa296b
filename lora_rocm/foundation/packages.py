"""Finds missing packages among those that are slow to import (torch and others), and explains failed imports."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from lora_rocm.errors import MachineError

HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "datasets")


def require_packages() -> None:
    """Check that torch and the other packages for training are installed, without importing them.

    Raises:
        MachineError: a package is missing.
    """
    for name in HEAVY:
        if find_spec(name) is None:
            raise unusable(ModuleNotFoundError(name=name))


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, keyed by name."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def imported() -> None:
    """Enable garbage collection and exclude all existing objects from it.

    Does nothing if collection is already enabled.

    A child process that imports torch starts with collection disabled. Otherwise scanning a million permanent
    objects would take a sixth of the import time.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extension modules check at exit that their objects were freed


def unusable(error: BaseException) -> MachineError:
    """Return the error to show if a package cannot be imported.

    Args:
        error: the exception that the import raised.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return MachineError(
            "package-missing",
            f"The package {package} is not installed; training, previews and measurements need it.",
            where=f"{sys.executable} (module {error.name})",
            fix=f"{installer(sys.platform == 'win32')}; lora-rocm doctor shows which torch this machine needs.",
        )
    said = next(iter(str(error).splitlines()), "")
    return MachineError(
        "package-broken",
        f"A package that training needs cannot be imported: {type(error).__name__}: {said}",
        where=sys.executable,
        fix=f"{installer(sys.platform == 'win32', repair=True)}; lora-rocm doctor shows details.",
    )


def installer(windows: bool, *, repair: bool = False) -> str:
    """Return the command that installs all packages, to be run in the repository's folder.

    ``repair``: whether an installed torch is installed again.
    """
    if windows:
        return r"scripts\windows\install.bat" + (" --repair" if repair else "")
    return "make install" + (" ARGS=--repair" if repair else "")
