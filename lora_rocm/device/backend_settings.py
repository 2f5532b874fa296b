"""Applies the planned settings to torch, once at the start of each process that computes with torch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.cuda import tunable

from lora_rocm.device import attention, hipblaslt
from lora_rocm.device.allocator import LimitFollower, limit
from lora_rocm.errors import MachineError
from lora_rocm.hardware.settings import Settings


def apply(settings: Settings, device: torch.device, *, wakes_later: bool = False) -> None:
    """Enable or disable libraries as planned.

    All processes that compute with torch call it, so the self-test uses the same settings as training.
    ``wakes_later``: do not read the GPU's free memory, which takes a second, because the caller will call ``wake``.
    """
    cudnn = torch.backends.cudnn
    hipblaslt.prefer_rocblas_if_off(os.environ)
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


def wake(device: torch.device, settings: Settings) -> None:
    """Initialise a GPU, which takes a second, and set the allocator's limit by the memory that is free then."""
    torch.zeros((), device=device)
    LimitFollower(device, settings).renew()


def plain_attention(device: torch.device) -> AbstractContextManager[None]:
    """Return a context for a VAE: on an AMD GPU it uses plain attention, elsewhere it changes nothing.

    A VAE has one attention head of width 512 in float32, which the self-test does not cover. Fused attention is known
    to crash on large images (ComfyUI comfy/model_management.py) and to produce black ones (pytorch#132004). Plain
    attention needs more memory: 2 GiB for an image of 1024x1024.
    """
    if device.type != "cuda" or torch.version.hip is None:
        return nullcontext()
    plain: AbstractContextManager[None] = attention.context_of("math")()
    return plain


def use_table(path: str) -> None:
    """Use the tuned matrix products in a table (PyTorch's TunableOp) from now on; other products do not change.

    Raises:
        MachineError: torch rejects the table: it was tuned with other library versions, or cannot be read.
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
            "PyTorch refuses this table of tuned matrix products: its libraries have other versions, or it is damaged.",
            where=path,
            fix="For new runs, create a new table with lora-rocm tune. To continue this run without a table: "
            "--set runtime.profile=safe",
        )
