"""Records that a Triton kernel, or attention, computed correctly on this machine.

A record is valid until the code, the libraries, the driver, the GPU or relevant environment variables change.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from lora_rocm import kernels
from lora_rocm.errors import StorageError
from lora_rocm.foundation.files import write_json
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.hardware.probe.detection import VARIABLES
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.kernels.backend import triton_version

KERNELS = Path(kernels.__file__).parent
IMPORT = re.compile(r"^\s*from\s+[\w.]*?(\w+)\s+import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)
"""An import: the last name of a module, and the imported names."""


class Proof:
    """The record that a case passed in a dtype. It applies only to the same code, libraries, driver, GPU and variables.

    Args:
        dtype: the run's dtype.
        case: the case as text: its name, its shapes and the code of its check.
        modules: names of the modules in ``folder`` with the kernel and its plain implementation, or with the test. The
            record depends on their code and on the modules in the folder that they import, but not on other kernels.
        environ: the environment of this process. Nothing is recorded if it lacks the parent's key of driver and GPU.
        folder: folder with the modules.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        case: str,
        modules: Iterable[str],
        environ: Mapping[str, str] = os.environ,
        folder: Path = KERNELS,
    ) -> None:
        stack = environ.get(STACK)
        self._facts = {
            "stack": stack,
            "torch": torch.__version__,
            "triton": triton_version(),
            "dtype": str(dtype),
            "case": case,
            "variables": {name: value for name, value in sorted(environ.items()) if _decides(name)},
        }
        digest = hashlib.sha256(repr(self._facts).encode())
        for path in sorted({path for module in modules for path in with_imported(folder, module)}):
            digest.update(path.read_bytes())
        self._path = own_app_dir() / f"kernels-{digest.hexdigest()[:16]}.json" if stack else None

    @property
    def is_known(self) -> bool:
        return self._path is not None and self._path.is_file()

    def keep(self) -> None:
        """Write the record. If it cannot be written, the next start compares the kernel again."""
        if self._path is not None:
            with suppress(StorageError):
                write_json(self._path, self._facts)


def _decides(name: str) -> bool:
    """Whether the environment variable ``name`` may change what kernels compute.

    This includes variables that select a GPU.
    """
    return name.startswith("TRITON_") or VARIABLES.fullmatch(name) is not None


@lru_cache(maxsize=256)
def with_imported(folder: Path, module: str) -> frozenset[Path]:
    """Return the paths of a module and of all modules in its folder that it imports, directly or indirectly.

    Imports inside functions are included.
    """
    found, waiting = set[Path](), [folder / f"{module}.py"]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for module_name, imported in IMPORT.findall(path.read_text(encoding="utf-8")):
            waiting += [folder / f"{name}.py" for name in (module_name, *re.findall(r"\w+", imported))]
    return frozenset(found)


def source_of(part: Callable[..., object]) -> str:
    """Return the source of a function or class.

    Threads call it. It makes no syntax tree, as ``inspect.getsource`` does for a class: in CPython 3.11, two threads
    that do this raise SystemError (github.com/python/cpython/issues/106905).
    """
    if not inspect.isclass(part):
        return inspect.getsource(part)
    lines = inspect.getsource(sys.modules[part.__module__]).splitlines(keepends=True)
    begin = next(number for number, line in enumerate(lines) if re.match(rf"class {part.__name__}\b", line))
    while lines[begin - 1].startswith("@"):
        begin -= 1
    return "".join(inspect.getblock(lines[begin:]))
