"""Records launches of kernels as requests to compile them, and makes the arguments of such a launch again.

A process that knows a step's launches needs a model, and seconds of imports. One that compiles them needs neither.
So one process records the launches on the meta device, and others compile the programs (``kernel_processes``).

A tensor is recorded as its dtype, the remainder of its address by 16, and the size of its memory. A program depends on
no other property. The compiling process creates a tensor with the same properties on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lora_rocm.processes.start_jobs import Launch

if TYPE_CHECKING:
    from triton import JITFunction

KERNELS = "lora_rocm.kernels."
DTYPE, START, BYTES = "dtype", "start", "bytes"
ALIGNED = 16
LARGEST_INT32 = 2**31 - 1


class _Parameter(Protocol):
    """A parameter of a kernel. Its name, and whether a program has its value as a constant."""

    name: str
    is_constexpr: bool


class _Kernel(Protocol):
    """A kernel of Triton."""

    fn: FunctionType
    params: list[_Parameter]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within this context, kernels are recorded and not launched. Yields the growing list, one launch per program.

    Raises:
        TypeError: a kernel has an argument that is neither a tensor nor a JSON value.
    """
    from triton import JITFunction

    run, found, known = JITFunction.run, list[Launch](), set[str]()

    def record(kernel: _Kernel, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        key = _key(kernel, arguments, options)
        if key not in known:
            known.add(key)
            values = {name: _as_json(value) for name, value in options.items()}
            found.append(Launch(kernel.fn.__module__, kernel.fn.__name__, [*map(_as_json, arguments)], values))

    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run


def _key(kernel: _Kernel, arguments: tuple[object, ...], options: Mapping[str, object]) -> str:
    """Return a text that differs for two launches if they need different programs."""
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    given = {
        **{parameter.name: value for parameter, value in zip(kernel.params, arguments, strict=False)},
        **options,
    }
    names = {parameter.name for parameter in kernel.params} - constants
    kinds = [(name, _kind(value) if name in names else value) for name, value in sorted(given.items())]
    return repr((kernel.fn.__module__, kernel.fn.__name__, kinds))


def _kind(value: object) -> object:
    """Return what a compiled program depends on, of a value that is not a constant in it."""
    match value:
        case Tensor():
            is_large = value.untyped_storage().nbytes() > LARGEST_INT32
            return str(value.dtype), value.data_ptr() % ALIGNED == 0, is_large
        case bool():
            return value
        case int():
            is_short = -LARGEST_INT32 - 1 <= value <= LARGEST_INT32
            return "int", value == 1, value % ALIGNED == 0, is_short, value >= 2**63
        case _:
            return type(value).__name__


def _as_json(value: object) -> object:
    """Return an argument as JSON."""
    match value:
        case Tensor():
            start, num_bytes = value.data_ptr() % ALIGNED, value.untyped_storage().nbytes()
            return {DTYPE: str(value.dtype).removeprefix("torch."), START: start, BYTES: num_bytes}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"no process can compile a kernel for a {type(value).__name__}")


def kernel_of(launch: Launch) -> JITFunction:
    """Return the kernel of a launch.

    Raises:
        LookupError, ImportError: there is no such kernel.
    """
    from triton import JITFunction

    found = vars(import_module(launch.module)).get(launch.kernel) if launch.module.startswith(KERNELS) else None
    if not isinstance(found, JITFunction):
        raise LookupError(f"{launch.module} has no kernel {launch.kernel}")
    return found


def argument(value: object) -> object:
    """Return the argument for a recorded one. A tensor is on the meta device, where addresses begin at 0."""
    if not isinstance(value, dict):
        return value
    dtype: torch.dtype = getattr(torch, value[DTYPE])
    memory = torch.empty(value[BYTES] // dtype.itemsize, dtype=dtype, device="meta")
    return memory[value[START] // dtype.itemsize :]
