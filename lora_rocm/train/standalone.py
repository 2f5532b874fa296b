"""Prepares the device and the base model in a process that does not train."""

from __future__ import annotations

import os

import torch

from lora_rocm.checks.attention_routes import checked_attention
from lora_rocm.device.allocator import LimitFollower
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.hardware.settings import Settings, settings_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import NoticeEvent
from lora_rocm.rundir.events import emit
from lora_rocm.rundir.run_context import RunContext


def start_device(recipe: Recipe) -> tuple[torch.device, Settings]:
    """Apply the planned settings to the recipe's device; return the device and the settings.

    Raises:
        MachineError, CanaryError: attention gives wrong results there (``checked_attention``).
    """
    settings = settings_from(os.environ)
    device = choose_device(recipe.runtime.device, settings)
    apply(settings, device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
    told = RunContext(emit=lambda event: emit(event) if isinstance(event, NoticeEvent) else None)
    return device, checked_attention(settings, device, (dtype, torch.float32), told, recipe.spec.head_widths)


def open_transfer(device: torch.device, settings: Settings) -> DeviceTransfer:
    """Return a new transfer to the device. The allocator is limited to the memory that is free now."""
    LimitFollower(device, settings).renew()
    pin = device.type == "cuda" and settings.pin_memory
    return DeviceTransfer(device, pin=pin, heap_copy=settings.heap_copy)


def open_placement(device: torch.device, settings: Settings) -> Resident:
    """Return a new placement that keeps all weights on the device, with a new transfer."""
    return Resident(open_transfer(device, settings))
