"""Errors of torch as errors that a user can read, and how a process leaves after one."""

from __future__ import annotations

import contextlib

import torch

from lora_rocm.errors import LoraRocmError, MachineError, storage_error

NO_HOST_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Invalid buffer size")
"""What torch's RuntimeError says when main memory cannot be had (c10/core/impl/alloc_cpu.cpp; the last on Macs)."""


def told(error: Exception, place: object, otherwise: MachineError) -> LoraRocmError:
    """Any error as one that a user can read.

    Args:
        error: what was met.
        place: the file or folder to name where an operating-system error names none.
        otherwise: what to say of an error that is not known.
    """
    if isinstance(error, LoraRocmError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, error.filename or place)
    return out_of_memory(error) or otherwise


def out_of_memory(error: BaseException) -> MachineError | None:
    """The error to show where a device's memory or main memory ran out; None where it was something else."""
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    on_host = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_HOST_MEMORY)
    )
    if not on_gpu and not on_host:
        return None
    return MachineError(
        "out-of-memory",
        f"{'The GPU' if on_gpu else 'The machine'} has not enough memory for this.",
        where=next(iter(str(error).splitlines()), type(error).__name__),
        fix="Go on with --set train.gradient_checkpointing=true --resume latest. If that is on, start a new run with a "
        "lower train.batch_size (and more train.gradient_accumulation_steps), data.resolution or lora.rank.",
    )


def settle() -> None:
    """Wait for what the GPU still does: on Windows a process that leaves before hangs for ever (pytorch#160759)."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # the error that this process leaves for; it has been told
            torch.cuda.synchronize()
