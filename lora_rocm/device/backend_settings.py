"""Applies the planned settings to torch, once at the start of a heavy process."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from threading import Thread

import torch
from torch.cuda import tunable

from lora_rocm.device import attention, blas
from lora_rocm.device.allocator import LimitFollower, limit
from lora_rocm.errors import MachineError
from lora_rocm.hardware.settings import Settings


def apply(settings: Settings, device: torch.device, *, wakes_later: bool = False) -> None:
    """Enable or disable libraries as planned. All heavy processes use it, so a test covers what training uses.

    ``wakes_later``: the caller calls ``wake``, which asks the driver for the free memory, because that takes a second.
    """
    cudnn = torch.backends.cudnn
    blas.obey(os.environ)
    cudnn.enabled = settings.miopen
    cudnn.allow_tf32 = False  # float32 means float32, above all for the VAE
    cudnn.benchmark = False  # exhaustive search takes minutes and crashes some GPUs (unsloth#11636)
    attention.enable(settings)
    if settings.products is not None and device.type == "cuda":
        use_table(settings.products)
    if wakes_later:
        limit(device, settings.memory_limit_bytes)
    else:
        LimitFollower(device, settings).renew()


def wake(device: torch.device, settings: Settings) -> Thread:
    """Initialise a GPU in a thread: it takes a second, and the driver releases the interpreter's lock meanwhile.

    The allocator's limit then follows other programs' memory. An error is logged, and is raised again when the GPU is
    used next.
    """

    def begin() -> None:
        torch.zeros((), device=device)
        LimitFollower(device, settings).renew()

    thread = Thread(target=begin, name="wake", daemon=True)
    thread.start()
    return thread


def plain_attention(device: torch.device) -> AbstractContextManager[None]:
    """Plain attention for a VAE on an AMD GPU: one head of 512 in float32, which the self-test does not cover.

    Fused attention is known to crash there on large images (ComfyUI comfy/model_management.py) and to give black ones
    (pytorch#132004). Plain attention takes more memory: 2 GiB for an image of 1024x1024.
    """
    if device.type != "cuda" or torch.version.hip is None:
        return nullcontext()
    plain: AbstractContextManager[None] = attention.context_of("math")()
    return plain


def use_table(path: str) -> None:
    """Use the tuned matrix products of a table (PyTorch's TunableOp) from now on; other products do not change.

    Raises:
        MachineError: torch refuses the table: it was tuned with other libraries, or cannot be read.
    """
    tunable.set_filename(path)  # else torch also looks for a file in the current folder
    tunable.tuning_enable(False)
    tunable.record_untuned_enable(False)
    tunable.enable(True)
    if torch.cuda.is_available():  # on ROCm the first product registers the versions that a table is checked against
        some = torch.ones(16, 16, device="cuda")
        torch.mm(some, some)
    if not tunable.read_file(path):
        raise MachineError(
            "products-refused",
            "PyTorch refuses this table of matrix products: it was tuned with other libraries, or is damaged.",
            where=path,
            fix="lora-rocm tune makes a new one for new runs. To continue without it: --set runtime.profile=safe",
        )
