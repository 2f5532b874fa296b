"""Translates torch's errors into errors for users, and lets a process exit safely after one."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_rocm.errors import LoraRocmError, MachineError, RestartError, resume_advice, storage_error
from lora_rocm.foundation.packages import unusable
from lora_rocm.foundation.tables import read_table


@dataclass(frozen=True)
class Messages:
    """Fragments of torch's RuntimeError messages, grouped by meaning."""

    no_device_memory: tuple[str, ...]
    no_host_memory: tuple[str, ...]
    device_faults: tuple[str, ...]
    no_faults: tuple[str, ...]


SAID = read_table(Path(__file__).with_name("torch_errors.toml"), Messages)
"""Fragments of torch's messages. They are read at import, because after an error there may not be enough memory."""
ONEDNN_FULL = "could not create a primitive"
"""oneDNN's whole message if it has no memory for a kernel; seen in a process with a memory limit."""

SETTLE_S = 30.0


def translated(error: Exception, place: object, otherwise: MachineError) -> LoraRocmError:
    """Translate any error into an error for users, and return it.

    Args:
        error: the caught error.
        place: file or folder to name if an operating-system error does not name one.
        otherwise: the error to return if ``error`` is of no known kind.
    """
    if isinstance(error, LoraRocmError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, error.filename or place)
    if isinstance(error, ImportError):
        return unusable(error)
    return machine_error(error) or otherwise


def machine_error(error: BaseException) -> RestartError | None:
    """Return an error for users if memory ran out or the GPU failed; None for other errors."""
    return out_of_memory(error) or device_fault(error)


def out_of_memory(error: BaseException) -> RestartError | None:
    """Return an error for users if device memory or main memory ran out; None for other errors."""
    on_gpu = isinstance(error, torch.OutOfMemoryError) or _contains(error, SAID.no_device_memory)
    on_host = isinstance(error, MemoryError) or _contains(error, SAID.no_host_memory) or str(error) == ONEDNN_FULL
    if not on_gpu and not on_host:
        return None
    smaller = (
        "If that is already on, start a new run with a lower train.batch_size (and more "
        "train.gradient_accumulation_steps), data.resolution or lora.rank."
    )
    return RestartError(
        "out-of-memory",
        f"{'The GPU' if on_gpu else 'The machine'} does not have enough memory for this.",
        where=_first_line(error),
        **resume_advice(
            f"Continue with --set train.gradient_checkpointing=true --resume latest. {smaller}",
            without_checkpoint=f"Continue with --set train.gradient_checkpointing=true. {smaller}",
        ),
    )


def device_fault(error: BaseException) -> RestartError | None:
    """Return an error for users if the GPU reported a fault or is lost; None for other errors.

    After such a fault this process can no longer use the device, so the run must be restarted.
    """
    if out_of_memory(error) is not None or not _contains(error, SAID.device_faults) or _contains(error, SAID.no_faults):
        return None
    return RestartError(
        "device-fault",
        "The GPU, its driver or one of its libraries reported a fault. This step was discarded.",
        where=_first_line(error),
        **resume_advice(
            "Run the same command with --resume latest. If this happens again, run lora-rocm doctor, which tests the "
            "kernels and reads the system's log. Restart the machine to restore a lost GPU."
        ),
    )


def settle(limit_s: float = SETTLE_S) -> None:
    """Wait for the GPU's pending work.

    On Windows, a process that exits before this work is done hangs (pytorch#160759).

    The wait ends after ``limit_s``, because a hung or lost GPU may never answer.
    """
    if torch.cuda.is_initialized():
        waiter = threading.Thread(target=_synchronize, daemon=True, name="settle")
        waiter.start()
        waiter.join(limit_s)


def _synchronize() -> None:
    with contextlib.suppress(RuntimeError):  # the error has already been reported
        torch.cuda.synchronize()


def _contains(error: BaseException, words: tuple[str, ...]) -> bool:
    """Whether ``error`` is a RuntimeError (torch's errors are) with any of these texts in its message."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
