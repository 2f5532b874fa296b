"""Constants that results depend on and that stay in memory for a run: tables, schedules, normalisations.

They are neither weights nor state, so neither the transfer nor the state guard knows them. Code that keeps a constant
registers it here, and the canary compares it with its fingerprint. A freed constant is forgotten.
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
    """Register a tensor that never changes from now on, in main memory or on a device, and return it.

    A tensor without data is not registered. Neither is a tensor created while a graph is captured or compiled, because
    its bytes cannot be read then. ``name``: shown to the user if its bytes change.
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
    """Whether a tensor is registered."""
    with _lock:
        return any(held() is tensor for held, _, _ in _held)


def changed_constants() -> list[str]:
    """Return the names of the constants with changed bytes. Waits for their devices."""
    with _lock:
        alive = [(tensor, name, wanted) for held, name, wanted in _held if (tensor := held()) is not None]
    return [name for tensor, name, wanted in alive if int(whole_fingerprint(tensor)) != wanted]
