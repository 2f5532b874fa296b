"""Names of FLUX.1's transformer in the original release's files, which kohya's scripts and ComfyUI use too."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lora_rocm.base_models.conversion import State
from lora_rocm.families.lora_file_names import Rows

DOUBLE, SINGLE = "double_blocks.#.", "single_blocks.#."
ATTENTION, ADDED = "transformer_blocks.#.attn.", "transformer_blocks.#.attn.add_"
OF_SINGLE = "single_transformer_blocks.#."
EMBEDDERS = {"time_in": "timestep_embedder", "vector_in": "text_embedder", "guidance_in": "guidance_embedder"}
MODULES: Mapping[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **{f"{old}.in_layer": (f"time_text_embed.{new}.linear_1",) for old, new in EMBEDDERS.items()},
    **{f"{old}.out_layer": (f"time_text_embed.{new}.linear_2",) for old, new in EMBEDDERS.items()},
    f"{DOUBLE}img_mod.lin": ("transformer_blocks.#.norm1.linear",),
    f"{DOUBLE}txt_mod.lin": ("transformer_blocks.#.norm1_context.linear",),
    f"{DOUBLE}img_attn.qkv": tuple(f"{ATTENTION}to_{letter}" for letter in "qkv"),
    f"{DOUBLE}txt_attn.qkv": tuple(f"{ADDED}{letter}_proj" for letter in "qkv"),
    f"{DOUBLE}img_attn.proj": (f"{ATTENTION}to_out.0",),
    f"{DOUBLE}txt_attn.proj": (f"{ATTENTION}to_add_out",),
    f"{DOUBLE}img_attn.norm.query_norm": (f"{ATTENTION}norm_q",),
    f"{DOUBLE}img_attn.norm.key_norm": (f"{ATTENTION}norm_k",),
    f"{DOUBLE}txt_attn.norm.query_norm": (f"{ATTENTION}norm_added_q",),
    f"{DOUBLE}txt_attn.norm.key_norm": (f"{ATTENTION}norm_added_k",),
    f"{DOUBLE}img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
    f"{DOUBLE}img_mlp.2": ("transformer_blocks.#.ff.net.2",),
    f"{DOUBLE}txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
    f"{DOUBLE}txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
    f"{SINGLE}modulation.lin": (f"{OF_SINGLE}norm.linear",),
    f"{SINGLE}linear1": (*(f"{OF_SINGLE}attn.to_{letter}" for letter in "qkv"), f"{OF_SINGLE}proj_mlp"),
    f"{SINGLE}linear2": (f"{OF_SINGLE}proj_out",),
    f"{SINGLE}norm.query_norm": (f"{OF_SINGLE}attn.norm_q",),
    f"{SINGLE}norm.key_norm": (f"{OF_SINGLE}attn.norm_k",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
"""Maps an original module to the diffusers modules that share its rows, in the order of the rows. # replaces the
block's number.
"""
ORIGINALS = {module: (old, place) for old, modules in MODULES.items() for place, module in enumerate(modules)}
TURNED = "norm_out.linear"  # the original has the shift first, diffusers the scale
BLOCK_NUMBER = re.compile(r"(?<=blocks\.)\d+(?=\.)")


def reads_guidance(tensors: Collection[str]) -> bool | None:
    """Whether a transformer has an input for guidance, by its tensor names. None if it is not a FLUX.1 transformer."""
    text = " ".join(tensors)
    if "vector_in." not in text and "text_embedder." not in text:
        return None
    return "guidance_in." in text or "guidance_embedder." in text


def original_rows(component: str, module: str, rows: int) -> Rows:
    """Return a module's position in files of the original release (see ``LoraFileNames.original``).

    A fused matrix consists of query, key, value and MLP. The MLP has four times as many rows as each of the others.
    """
    number = BLOCK_NUMBER.search(module)
    original, place = ORIGINALS[BLOCK_NUMBER.sub("#", module)]
    name = original.replace("#", number[0]) if number else original
    if module == TURNED:
        return [(name, rows // 2, rows // 2), (name, 0, rows // 2)]
    return [(name, place * (rows // 4 if module.endswith("proj_mlp") else rows), rows)]


def transformer_of_original(state: State, module: nn.Module) -> State:
    """Convert original names to diffusers' names, and split fused tensors into query, key, value and MLP.

    Tensors with diffusers' names are kept.
    """
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    converted: State = {}
    for name, tensor in state.items():
        path, _, ending = name.rpartition(".")
        number = BLOCK_NUMBER.search(path)
        modules = MODULES.get(BLOCK_NUMBER.sub("#", path))
        if modules is None:
            converted[name] = tensor
            continue
        new = [each.replace("#", number[0]) if number else each for each in modules]
        converted |= _parts(tensor, [f"{each}.{ending.replace('scale', 'weight')}" for each in new], shapes)
    return converted


def _parts(tensor: Tensor, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Split the rows of a tensor into tensors with these names."""
    if names[0].startswith(TURNED):
        return {names[0]: tensor.roll(len(tensor) // 2, 0)}
    if len(names) == 1:
        return {names[0]: tensor}
    found: State = {}
    first = 0
    for name in names:
        count = shapes[name][0]
        found[name], first = tensor[first : first + count], first + count
    return found
