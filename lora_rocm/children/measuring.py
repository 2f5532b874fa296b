"""Functions that all measuring child processes use: they describe the machine, and end the process cleanly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_rocm.device.allocator import room_bytes
from lora_rocm.device.device_memory import shares_main_memory
from lora_rocm.device.precision import describe
from lora_rocm.device.torch_errors import machine_error, settle
from lora_rocm.errors import LoraRocmError
from lora_rocm.hardware.pci import address_of
from lora_rocm.hardware.settings import Settings
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit


def machine(device: torch.device, settings: Settings) -> dict[str, Any]:
    """Return a description of the machine for tables and files. ``gpus`` lists the name and PCI address of each GPU."""
    on_gpu = device.type == "cuda"
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count() if on_gpu else 0)]
    return {
        "device": describe(device),
        "gpu": on_gpu,
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "budget_bytes": room_bytes(device, settings) if on_gpu else None,
        "integrated": shares_main_memory(torch.device("cuda", 0)) if found else None,
        "gpus": [{"name": gpu.name, "address": address_of(gpu)} for gpu in found],
    }


def run_reported(measure: Callable[[], None]) -> int:
    """Run ``measure``, wait until the device is idle, and return the exit code.

    Errors for the user are emitted as events.
    """
    problem: LoraRocmError | None = None
    try:
        measure()
    except LoraRocmError as error:
        problem = error
    except (RuntimeError, MemoryError) as error:
        problem = machine_error(error)
        if problem is None:
            raise
    if problem is not None:
        emit(ErrorEvent(**problem.to_event()))
    settle()  # Windows: leaving with kernels in flight hangs (pytorch#160759)
    return problem.exit_code if problem is not None else 0
