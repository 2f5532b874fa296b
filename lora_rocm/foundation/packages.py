"""The packages that the heavy half imports: finds missing ones, words the error for an unusable one, imports fast."""

from __future__ import annotations

import atexit
import gc
import sys
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


def imported() -> None:
    """Search for garbage from now on, but never among what exists. Does nothing where the search is on.

    A heavy child imports without it: searching a million objects that stay takes a sixth of the time of the imports.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extension modules look at exit whether all of their objects are gone


def unusable(error: BaseException) -> MachineError:
    """The error to show if a package could not be imported.

    Args:
        error: the exception that the import raised.
    """
    install = installer(sys.platform == "win32")
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return MachineError(
            "package-missing",
            f"The package {package} is not installed; training, previews and measurements need it.",
            where=f"{sys.executable} (module {error.name})",
            fix=f"{install}; lora-rocm doctor says which torch this machine needs.",
        )
    said = next(iter(str(error).splitlines()), "")
    return MachineError(
        "package-broken",
        f"A package that training needs cannot be imported: {type(error).__name__}: {said}",
        where=sys.executable,
        fix=f"{install} {'' if sys.platform == 'win32' else 'ARGS='}--repair; lora-rocm doctor says more.",
    )


def installer(windows: bool) -> str:
    """The command that installs everything, run in the folder of the repository."""
    return r"scripts\windows\install.bat" if windows else "make install"
