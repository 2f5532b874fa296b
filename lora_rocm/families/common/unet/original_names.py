"""Converts UNets and CLIP text encoders from the original release's names. Its checkpoints contain all components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_open_clip_checkpoint,
)
from torch import nn

from lora_rocm.base_models.conversion import Converter, State, own_names
from lora_rocm.model_files.header import TensorFileHeader

# Known tensors outside the components of a checkpoint: remains of training, and marks of the prediction type.
KNOWN_BESIDE = (
    "model_ema.", "model_ema", "v_pred", "ztsnr", "denoiser.", "alphas_cumprod", "betas", "sqrt_", "log_one_minus",
    "posterior_", "global_step", "logvar", "embedding_manager", "lvlb_weights", "scale_factor",
)  # fmt: skip


def of_unet(state: State, module: nn.Module) -> State:
    """Convert a UNet's tensors to diffusers' names."""
    config: Any = module.config
    return dict(convert_ldm_unet_checkpoint(state, dict(config)))


def of_clip(state: State, module: nn.Module) -> State:
    """Convert the first text encoder's tensors to transformers' names."""
    return own_names(convert_ldm_clip_checkpoint(state), module)


def of_open_clip(prefix: str) -> Converter:
    """Return a converter for an OpenCLIP text encoder, which has q, k and v in one tensor."""
    return lambda state, module: own_names(convert_open_clip_checkpoint(module, state, prefix=prefix), module)


def unused_tensors(header: TensorFileHeader, prefixes: Sequence[str]) -> list[str]:
    """Return names of unknown tensors that do not belong to any component."""
    return sorted(name for name in header.tensors if not name.startswith((*prefixes, *KNOWN_BESIDE)))
