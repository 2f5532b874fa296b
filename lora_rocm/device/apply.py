"""The planned settings, put into torch: once, at the start of a heavy process."""

from __future__ import annotations

import torch

from lora_rocm.device.memory import limit
from lora_rocm.host.settings import Settings


def apply(settings: Settings, device: torch.device) -> None:
    """Switch libraries on or off as planned; the same for every heavy process, so that a test tests what trains."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    cudnn.enabled = settings.miopen
    cudnn.allow_tf32 = False  # float32 means float32, above all for the VAE
    cudnn.benchmark = False  # exhaustive search takes minutes and crashes on some cards (unsloth#11636)
    fused = settings.attention == "auto"
    cuda.enable_flash_sdp(fused)
    cuda.enable_mem_efficient_sdp(fused)
    cuda.enable_cudnn_sdp(fused)
    limit(device, settings.memory_limit_bytes)
