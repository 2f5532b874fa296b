"""Chooses the backend of the kernels: Triton or plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from lora_rocm.hardware.archs import TRITON_PACKAGES, triton_refusal

Implementation = Literal["eager", "triton"]

LAUNCH: dict[str, Any] = {"enable_fp_fusion": True}
"""Options of every launch. They fuse multiply and add. That is the default up to Triton 3.9 but not from 3.10 on, so
without them results and speed would depend on the version.
"""


def triton_version() -> str | None:
    """The installed version of Triton under any of its package names, or None."""
    for package in TRITON_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def refusal(device: torch.device) -> str | None:
    """The reason why Triton kernels cannot run on a device, as half a sentence, or None if they can be tried.

    The meta device represents the GPU of this process, or any GPU if there is none: its tensors only count memory, and
    the count has to include the kernels' memory.
    """
    if device.type not in ("cuda", "meta"):
        return "Triton's kernels are for GPUs"
    if find_spec("triton") is None:
        return "this PyTorch has no Triton (PyTorch for AMD GPUs on Windows is built without it)"
    gfx, installed = _gfx(device), triton_version()
    return None if gfx is None or installed is None else triton_refusal(installed, gfx)


def _gfx(device: torch.device) -> str | None:
    """The architecture of an AMD GPU ("gfx1100"), or None."""
    if not torch.version.hip or (device.type == "meta" and not torch.cuda.is_initialized()):
        return None
    name: str = torch.cuda.get_device_properties(device if device.type == "cuda" else None).gcnArchName
    return name.partition(":")[0]


def available(device: torch.device) -> bool:
    """Whether Triton kernels can be tried on a device."""
    return refusal(device) is None


def launches(implementation: Implementation, x: Tensor, kernel: Callable[[], str]) -> bool:
    """Whether a function of ``x`` launches its Triton kernels. On the meta device plain PyTorch replaces them.

    ``kernel``: makes "module.function: variant", the name of the compiled kernels. It is called on the meta device
    alone, where ``kernels_seen`` collects the names: a step makes no names.
    """
    if implementation == "triton":
        note_kernel(x, kernel)
    return implementation == "triton" and not x.is_meta


def note_kernel(x: Tensor, kernel: Callable[[], str]) -> None:
    """Name kernels that a function of ``x`` launches on a GPU, if ``x`` is on the meta device; see ``launches``."""
    if x.is_meta:
        for names in _collecting:
            names.add(kernel())


_collecting: list[set[str]] = []


@contextmanager
def kernels_seen() -> Iterator[set[str]]:
    """Collect the names of the kernels that a pass over meta tensors would launch on a GPU."""
    names = set[str]()
    _collecting.append(names)
    try:
        yield names
    finally:
        _collecting.remove(names)


def implementation_for(device: torch.device, triton: bool = True) -> Implementation:
    """The backend to use on a device. ``triton=False`` selects plain PyTorch."""
    return "triton" if triton and available(device) else "eager"
