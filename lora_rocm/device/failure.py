"""Errors of torch as errors that a user can read."""

from __future__ import annotations

import torch

from lora_rocm.errors import MachineError

NO_HOST_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Invalid buffer size")
"""What torch's RuntimeError says when main memory cannot be had (c10/core/impl/alloc_cpu.cpp; the last on Macs)."""


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
        fix="Set train.gradient_checkpointing: true, or lower train.batch_size (and raise "
        "train.gradient_accumulation_steps), lora.rank, or the size of the pictures.",
    )
