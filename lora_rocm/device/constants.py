"""Registry of constants that affect results and stay in memory for a run: tables, schedules, normalisations.

They are neither weights nor state, so neither the transfer nor the state guard checks them. Code that keeps a constant
registers it here, and the canary compares its bytes with its fingerprint. A constant that is freed is no longer
checked.
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

from lora_rocm.device.transfer import whole_fingerprint

_held: list[tuple[ref[Tensor], str, int]] = []
_lock = threading.Lock()


def constant(tensor: Tensor, name: str) -> Tensor:
    """Register a tensor that will not change from now on, in main memory or on a device, and return it.

    A tensor without data is not registered. A tensor created during graph capture or compilation is not registered
    either, because its bytes cannot be read at that time. ``name``: reported to the user if the tensor's bytes change.
    """
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if tensor.is_meta or capturing or torch.compiler.is_compiling():
        return tensor
    with _lock:
        _held[:] = [entry for entry in _held if entry[0]() is not None]
        if all(entry[0]() is not tensor for entry in _held):
            _held.append((ref(tensor), name, int(whole_fingerprint(tensor))))
    return tensor


def is_constant(tensor: Tensor) -> bool:
    """Whether this tensor object is registered as a constant."""
    with _lock:
        return any(held() is tensor for held, _, _ in _held)


def changed_constants() -> list[str]:
    """Return the names of the registered constants with changed bytes. Waits for their devices."""
    with _lock:
        alive = [(tensor, name, wanted) for held, name, wanted in _held if (tensor := held()) is not None]
    return [name for tensor, name, wanted in alive if int(whole_fingerprint(tensor)) != wanted]
