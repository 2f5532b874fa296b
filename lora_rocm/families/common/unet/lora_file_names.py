"""Names of SDXL's and Stable Diffusion's modules in other programs.

kohya, ComfyUI and A1111 number UNet blocks like the original (sgm) code. Its number counts all layers of the downward
path (input_blocks), the middle, or the upward path (output_blocks). The mapping is derived from the UNet's config.
"""

from __future__ import annotations

import re

from lora_rocm.model_files.config_file import Config

ATTENTION = r"attn[12]\.(to_q|to_k|to_v|to_out\.0)"
TRANSFORMER = r".*\.transformer_blocks\.\d+\."
MLP = r"ff\.net\.(0\.proj|2)"
PROJECTIONS = r".*\.attentions\.\d+\.(proj_in|proj_out)"
RESNETS = r".*\.resnets\.\d+\.(conv1|conv2|conv_shortcut|time_emb_proj)|.*\.(downsamplers|upsamplers)\.0\.conv"
TEXT = r"(text_model\.)?encoder\.layers\.\d+\.(self_attn\.(q_proj|k_proj|v_proj|out_proj)|mlp\.(fc1|fc2))"

UNET_TARGETS = {
    "attention": TRANSFORMER + ATTENTION,
    "attention-mlp": f"{TRANSFORMER}({ATTENTION}|{MLP})|{PROJECTIONS}",
    "attention-mlp-conv": f"{TRANSFORMER}({ATTENTION}|{MLP})|{PROJECTIONS}|{RESNETS}",
}

RESNET_PARTS = {
    "norm1": "in_layers.0",
    "norm2": "out_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
MIDDLE = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
PREFIXES = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}


def sgm_name(module: str, config: Config) -> str:
    """Return the original code's dotted name of a UNet module ("input_blocks.4.1.proj_in").

    Args:
        module: path of the module in diffusers' UNet ("down_blocks.1.attentions.0.proj_in").
        config: the UNet's config (layers_per_block, down_block_types, up_block_types).

    Raises:
        ValueError: ``module`` is not a module of an SDXL UNet.
    """
    for old, new in OUTER.items():
        if module == old:
            return new
    layers = config.whole("layers_per_block", 2)
    if match := re.fullmatch(r"mid_block\.((?:resnets|attentions)\.\d+)\.(.+)", module):
        return f"middle_block.{MIDDLE[match[1]]}.{_inner(match[1], match[2])}"
    if match := re.fullmatch(r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", module):
        number = int(match[1]) * (layers + 1) + int(match[3]) + 1
        return f"input_blocks.{number}.{0 if match[2] == 'resnets' else 1}.{_inner(match[2], match[4])}"
    if match := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv", module):
        return f"input_blocks.{(int(match[1]) + 1) * (layers + 1)}.0.op"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", module):
        number = int(match[1]) * (layers + 1) + int(match[3])
        return f"output_blocks.{number}.{0 if match[2] == 'resnets' else 1}.{_inner(match[2], match[4])}"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.conv", module):
        block = int(match[1])
        position = (
            2 if "CrossAttn" in config.texts("up_block_types")[block] else 1
        )  # after the resnet and the attention, if any
        return f"output_blocks.{block * (layers + 1) + layers}.{position}.conv"
    raise ValueError(f"{module} is not a module of an SDXL UNet")


def _inner(kind: str, rest: str) -> str:
    return RESNET_PARTS[rest] if kind.startswith("resnets") else rest


def kohya_key(component: str, module: str, unet_config: Config) -> str:
    """Return kohya's name of a module, without ``.lora_down.weight``.

    transformers 5 moved the layers of CLIPTextModel up by one level, but not the layers of CLIPTextModelWithProjection.
    kohya's names contain ``text_model`` in both cases.
    """
    if component == "unet":
        return f"{PREFIXES[component]}{sgm_name(module, unet_config).replace('.', '_')}"
    path = "text_model." + module.removeprefix("text_model.")
    return f"{PREFIXES[component]}{path.replace('.', '_')}"
