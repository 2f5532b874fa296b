"""Names of Anima's transformer in the original release's files, which ComfyUI and kohya's scripts use too."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from lora_rocm.base_models.conversion import State
from lora_rocm.model_files.config_file import Config

PREFIXES = ("net.", "model.diffusion_model.", "diffusion_model.")
CONDITIONER = "llm_adapter."
IGNORED = (CONDITIONER, "pos_embedder.", "accum_")
"""Name parts of tensors in the file that the transformer does not read: conditioner, computed positions, and training
counters.
"""
MAX_SIZE = [1, 1 << 14, 1 << 14]  # in frames, and in latents
PARTS = {
    "transformer_blocks.": "blocks.",
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out.0": "output_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
    "norm1.linear_": "adaln_modulation_self_attn.",
    "norm2.linear_": "adaln_modulation_cross_attn.",
    "norm3.linear_": "adaln_modulation_mlp.",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out": "final_layer.linear",
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder": "t_embedder.1",
    "time_embed.norm": "t_embedding_norm",
}
"""Maps parts of diffusers' names to parts of the original names."""


def original(name: str) -> str:
    """Return the original name of a module or tensor of diffusers' transformer."""
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return name


def config_changes(config: Config, tensors: Collection[str]) -> dict[str, Any]:
    """Return the changed config values, as ``Layout.changed`` requires.

    The padding mask becomes an ordinary input channel. Otherwise the model would resize the mask with torchvision,
    which may not be installed. ``max_size`` is raised so that it does not limit positions. The number of blocks is
    counted from the tensor names, because larger fine-tunes have more blocks.
    """
    blocks = {found[1] for name in tensors if (found := re.search(r"(?<!adapter\.)blocks\.(\d+)\.", name))}
    channels = config.whole("in_channels", 16) + config.flag("concat_padding_mask", default=True)
    depth = {"num_layers": len(blocks)} if tensors else {}
    return {"in_channels": channels, "concat_padding_mask": False, "max_size": MAX_SIZE, **depth}


def transformer_of_original(state: State, module: nn.Module) -> State:
    """Convert original tensor names to diffusers' names. Tensors with diffusers' names are kept."""
    ours = {original(name): name for name in module.state_dict()}
    return {ours.get(name, name): tensor for name, tensor in state.items()}
