"""Tensor names of the original releases, from diffusers' names: the product's tables inverted, written
independently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

OF_BLOCK = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
OF_SINGLE = {
    "norm.linear": "modulation.lin",
    "proj_out": "linear2",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
}
OUTSIDE = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}


def of_flux(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's tensors as the original release names and fuses them."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        path, _, ending = name.rpartition(".")
        kind, number, inner = (*path.split(".", 2), "", "")[:3]
        if path == "norm_out.linear":
            scale, shift = tensor.chunk(2)
            found[f"final_layer.adaLN_modulation.1.{ending}"] = torch.cat([shift, scale])
        elif path in OUTSIDE:
            found[f"{OUTSIDE[path]}.{ending}"] = tensor
        elif kind == "transformer_blocks":
            for start, parts in (("img", "attn.to_{}"), ("txt", "attn.add_{}_proj")):
                rows = (
                    torch.cat([state[f"{kind}.{number}.{parts.format(letter)}.{ending}"] for letter in "qkv"])
                    if (inner == parts.format("q"))
                    else None
                )
                if rows is not None:
                    found[f"double_blocks.{number}.{start}_attn.qkv.{ending}"] = rows
            if inner in OF_BLOCK:
                ending = "scale" if ".norm_" in inner else ending
                found[f"double_blocks.{number}.{OF_BLOCK[inner]}.{ending}"] = tensor
        elif inner in OF_SINGLE:
            ending = "scale" if ".norm_" in inner else ending
            found[f"single_blocks.{number}.{OF_SINGLE[inner]}.{ending}"] = tensor
        elif inner == "proj_mlp":
            parts = [f"{kind}.{number}.{part}.{ending}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", inner)]
            found[f"single_blocks.{number}.linear1.{ending}"] = torch.cat([state[part] for part in parts])
    return found


def module_of_flux(path: str) -> tuple[str, int]:
    """(the original's module, place among diffusers' modules in its rows) of a block's module."""
    kind, number, inner = path.split(".", 2)
    parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    if kind == "single_transformer_blocks":
        return (
            f"single_blocks.{number}.{OF_SINGLE.get(inner, 'linear1')}",
            parts.index(inner) if inner in parts else 0,
        )
    for start, names in (("img", parts[:3]), ("txt", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"))):
        if inner in names:
            return f"double_blocks.{number}.{start}_attn.qkv", names.index(inner)
    return f"double_blocks.{number}.{OF_BLOCK[inner]}", 0


def module_of_z_image(path: str) -> tuple[str, int]:
    block, _, inner = path.rpartition(".attention.")
    if inner in ("to_q", "to_k", "to_v"):
        return f"{block}.attention.qkv", ("to_q", "to_k", "to_v").index(inner)
    return (f"{block}.attention.out" if inner == "to_out.0" else path), 0


def of_z_image(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's tensors as the original release names them: query, key and value in one."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.replace("all_x_embedder.2-1.", "x_embedder.").replace("all_final_layer.2-1.", "final_layer.")
        name = name.replace("attention.to_out.0.", "attention.out.")
        name = name.replace("norm_q.", "q_norm.").replace("norm_k.", "k_norm.")
        if ".attention.to_q." in name:
            parts = [state[name.replace("to_q", f"to_{letter}")] for letter in "qkv"]
            found[name.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".attention.to_" not in name:
            found[name] = tensor.contiguous()
    return found


OF_ANIMA = {
    "attn1.to_q": "self_attn.q_proj",
    "attn1.to_k": "self_attn.k_proj",
    "attn1.to_v": "self_attn.v_proj",
    "attn1.to_out.0": "self_attn.output_proj",
    "attn1.norm_q": "self_attn.q_norm",
    "attn1.norm_k": "self_attn.k_norm",
    "attn2.to_q": "cross_attn.q_proj",
    "attn2.to_k": "cross_attn.k_proj",
    "attn2.to_v": "cross_attn.v_proj",
    "attn2.to_out.0": "cross_attn.output_proj",
    "attn2.norm_q": "cross_attn.q_norm",
    "attn2.norm_k": "cross_attn.k_norm",
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
    "norm1.linear_1": "adaln_modulation_self_attn.1",
    "norm1.linear_2": "adaln_modulation_self_attn.2",
    "norm2.linear_1": "adaln_modulation_cross_attn.1",
    "norm2.linear_2": "adaln_modulation_cross_attn.2",
    "norm3.linear_1": "adaln_modulation_mlp.1",
    "norm3.linear_2": "adaln_modulation_mlp.2",
}
OUTSIDE_ANIMA = {
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder.linear_1": "t_embedder.1.linear_1",
    "time_embed.t_embedder.linear_2": "t_embedder.1.linear_2",
    "time_embed.norm": "t_embedding_norm",
    "norm_out.linear_1": "final_layer.adaln_modulation.1",
    "norm_out.linear_2": "final_layer.adaln_modulation.2",
    "proj_out": "final_layer.linear",
}


def of_anima(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module_of_anima(name.rpartition('.')[0])[0]}.weight": tensor for name, tensor in state.items()}


def module_of_anima(path: str) -> tuple[str, int]:
    block = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", path)
    return (OUTSIDE_ANIMA[path] if block is None else f"blocks.{block[1]}.{OF_ANIMA[block[2]]}"), 0


OF_WAN = {
    ".norm1.": ".residual.0.",
    ".conv1.": ".residual.2.",
    ".norm2.": ".residual.3.",
    ".conv2.": ".residual.6.",
    "conv_shortcut.": "shortcut.",
    "mid_block.resnets.0.": "middle.0.",
    "mid_block.attentions.0.": "middle.1.",
    "mid_block.resnets.1.": "middle.2.",
    "down_blocks.": "downsamples.",
    "conv_in.": "conv1.",
    "norm_out.": "head.0.",
    "conv_out.": "head.2.",
    "post_quant_conv.": "conv2.",
    "quant_conv.": "conv1.",
}
UP = re.compile(r"up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)")


def of_wan_vae(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layers of its decoder are counted through all blocks: four of each, and the last one enlarges."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = UP.search(name)
        if place is not None:
            number = 4 * int(place[1]) + (int(place[3]) if place[2] == "resnets" else 3)
            name = name.replace(place[0], f"upsamples.{number}")
        for ours, theirs in OF_WAN.items():
            name = name.replace(ours, theirs)
        found[name] = tensor
    return found
