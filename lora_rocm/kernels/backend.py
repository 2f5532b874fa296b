"""Chooses between the Triton and the plain PyTorch implementation of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor

from lora_rocm.hardware.archs import TRITON_PACKAGES, triton_refusal

Implementation = Literal["eager", "triton"]

LAUNCH: dict[str, Any] = {"enable_fp_fusion": True}
"""Options for launching a kernel. enable_fp_fusion fuses multiply and add. Triton does so by default up to 3.9, but no
longer from 3.10 on; without the option, results and speed would depend on the version.
"""
BROKEN = (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""Errors of a Triton that is damaged or does not fit this Python."""


def triton_version() -> str | None:
    """The installed version of Triton under any of its package names, or None."""
    for package in TRITON_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def hash_triton() -> Thread | None:
    """Let a thread hash Triton's files, which takes 0.4 s. A process needs the hash before its first kernel.

    Triton is imported here and not in the thread: if two threads import it at once, one of them gets half of it.

    Returns:
        The thread; None if Triton cannot be imported, or is older than 3.5, where the hash is in another module.
    """
    try:
        from triton.runtime.cache import triton_key
    except BROKEN:  # the comparison of the kernels has the same error, and reports it
        return None
    thread = Thread(target=_call, args=(triton_key,), daemon=True, name="hash")
    thread.start()
    return thread


def _call(triton_key: Callable[[], object]) -> None:
    with suppress(*BROKEN):  # the first kernel has the same error, and reports it
        triton_key()


def refusal(device: torch.device) -> str | None:
    """Return the reason why a device cannot run Triton kernels, as a clause, or None if it may be able to run them.

    The meta device represents this process's GPU, or any GPU if there is none. Its tensors serve only to count memory,
    which must include the kernels' memory.
    """
    if device.type not in ("cuda", "meta"):
        return "Triton kernels need a GPU"
    if find_spec("triton") is None:
        return "this PyTorch has no Triton (PyTorch for AMD GPUs on Windows is built without it)"
    gfx, installed = gfx_of(device), triton_version()
    return None if gfx is None or installed is None else triton_refusal(installed, gfx)


def gfx_of(device: torch.device) -> str | None:
    """Return the architecture of an AMD GPU ("gfx1100"), or None for other devices or if no GPU is in use yet."""
    if not torch.version.hip or (device.type == "meta" and not torch.cuda.is_initialized()):
        return None
    name: str = torch.cuda.get_device_properties(device if device.type == "cuda" else None).gcnArchName
    return name.partition(":")[0]


def available(device: torch.device) -> bool:
    """Whether a device may be able to run Triton kernels."""
    return refusal(device) is None


def launches(implementation: Implementation, x: Tensor, kernel: Callable[[], str]) -> bool:
    """Whether to launch the Triton kernels for ``x``.

    This is false on the meta device, where plain PyTorch replaces them, except within ``launching_on_meta``.

    ``kernel``: returns the name "module.function: variant" of the kernels. It is called only on the meta device, where
    ``kernels_seen`` collects the names, so a training step builds no names.
    """
    if implementation == "triton":
        note_kernel(x, kernel)
    return implementation == "triton" and (not x.is_meta or _launches_on_meta)


def note_kernel(x: Tensor, kernel: Callable[[], str]) -> None:
    """Record the name of the kernels that a GPU would launch, if ``x`` is on the meta device; see ``launches``."""
    if x.is_meta:
        for names in _collecting:
            names.add(kernel())


_launches_on_meta = False


@contextmanager
def launching_on_meta() -> Iterator[None]:
    """Within this context, kernels are launched for tensors on the meta device, too.

    It is for processes that compile a kernel at its launch, and do not run it.
    """
    global _launches_on_meta
    _launches_on_meta = True
    try:
        yield
    finally:
        _launches_on_meta = False


_plain = frozenset[str]()


def use_plain(kernels: Collection[str]) -> None:
    """Compute these kernels (see ``launches``) in plain PyTorch from now on, also where Triton is asked for."""
    global _plain
    _plain = frozenset(kernels)


@contextmanager
def nothing_plain() -> Iterator[None]:
    """Within this context every kernel is launched that Triton is asked for. For comparisons with plain PyTorch."""
    before = _plain
    use_plain(())
    try:
        yield
    finally:
        use_plain(before)


def decided(implementation: Implementation, kernel: Callable[[], str]) -> Implementation:
    """Return the implementation of one kernel: "eager" if this run computes it in plain PyTorch (``use_plain``).

    ``kernel``: returns the name, as for ``launches``. It is called only if some kernel is computed in plain PyTorch.
    """
    return "eager" if implementation == "triton" and _plain and kernel() in _plain else implementation


_collecting: list[set[str]] = []


def note_shared(x: Tensor) -> Tensor:
    """Return ``x``, and record that all samples of a pass share its memory, if it is on the meta device.

    The size of such a tensor does not depend on the number of samples, as the size of a dense weight.
    """
    if x.is_meta:
        for note in _noting:
            note(x)
    return x


_noting: list[Callable[[Tensor], None]] = []


@contextmanager
def shared_noted(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Within this context, call ``note`` with the tensors on the meta device that all samples share."""
    _noting.append(note)
    try:
        yield
    finally:
        _noting.remove(note)


@contextmanager
def kernels_seen() -> Iterator[set[str]]:
    """Collect the names of the kernels that a pass over meta tensors would launch on a GPU. Yields the growing set."""
    names = set[str]()
    _collecting.append(names)
    try:
        yield names
    finally:
        _collecting.remove(names)


def implementation_for(device: torch.device, triton: bool = True) -> Implementation:
    """Return "triton" if ``triton`` is true and the device may be able to run Triton kernels, else "eager"."""
    return "triton" if triton and available(device) else "eager"
