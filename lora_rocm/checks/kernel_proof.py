"""Remembers that the Triton kernels gave right numbers here, until something changes that this depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from lora_rocm import kernels
from lora_rocm.errors import StorageError
from lora_rocm.foundation.files import write_json
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.hardware.probe.detection import VARIABLES
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.kernels.backend import triton_version

SOURCES = (Path(kernels.__file__).parent, Path(__file__).parent)


class Proof:
    """The record that all kernels passed in a dtype, for these kernels, checks, libraries, driver, GPU and variables.

    Args:
        dtype: of the run.
        environ: the environment of this process. Without the parent's key of driver and GPU nothing is remembered.
        sources: folders with the code of the kernels and of their checks.
    """

    def __init__(
        self, dtype: torch.dtype, environ: Mapping[str, str] = os.environ, sources: tuple[Path, ...] = SOURCES
    ) -> None:
        stack = environ.get(STACK)
        self._facts = {
            "stack": stack,
            "torch": torch.__version__,
            "triton": triton_version(),
            "dtype": str(dtype),
            "variables": {name: value for name, value in sorted(environ.items()) if _decides(name)},
        }
        digest = hashlib.sha256(repr(self._facts).encode())
        for path in (path for folder in sources for path in sorted(folder.glob("*.py"))):
            digest.update(path.read_bytes())
        self._path = own_app_dir() / f"kernels-{digest.hexdigest()[:16]}.json" if stack else None

    @property
    def is_known(self) -> bool:
        return self._path is not None and self._path.is_file()

    def keep(self) -> None:
        """Write the record. If it cannot be written, the next start compares the kernels again."""
        if self._path is not None:
            with suppress(StorageError):
                write_json(self._path, self._facts)


def _decides(name: str) -> bool:
    """Whether a variable may change what kernels compute; the choice of a GPU is among them."""
    return name.startswith("TRITON_") or VARIABLES.fullmatch(name) is not None
