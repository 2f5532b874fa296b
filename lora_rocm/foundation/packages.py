"""The packages that the heavy half imports: finds missing ones, builds the error for a broken one, imports fast."""

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
    """Check that the packages of the heavy half are installed, without importing them.

    Raises:
        MachineError: a package is missing.
    """
    for name in HEAVY:
        if find_spec(name) is None:
            raise unusable(ModuleNotFoundError(name=name))


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Name -> version, of the packages that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def imported() -> None:
    """Enable garbage collection, but exclude all existing objects from it. Does nothing if it is enabled already.

    A heavy child imports with collection off: scanning a million permanent objects takes a sixth of the import time.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extension modules check at exit that their objects were freed


def unusable(error: BaseException) -> MachineError:
    """The error to show if a package could not be imported.

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
    """The command that installs everything, run in the repository's folder. repair: reinstall a present torch, too."""
    if windows:
        return r"scripts\windows\install.bat" + (" --repair" if repair else "")
    return "make install" + (" ARGS=--repair" if repair else "")
