"""Tensor names of Z-Image's transformer in files of the original release and of ComfyUI."""

from __future__ import annotations

from torch import nn

from lora_rocm.base_models.conversion import State
from lora_rocm.families.lora_file_names import Rows

STARTS = {"x_embedder.": "all_x_embedder.2-1.", "final_layer.": "all_final_layer.2-1."}
PARTS = {
    ".attention.out.": ".attention.to_out.0.",
    ".attention.q_norm.": ".attention.norm_q.",
    ".attention.k_norm.": ".attention.norm_k.",
}
FUSED = ".attention.qkv."


def original_rows(component: str, module: str, rows: int) -> Rows:
    """Return a module's position in files of the original release (see ``LoraFileNames.original``).

    A fused matrix consists of query, key and value, which have the same number of rows.
    """
    path = f"{module}."
    for old, new in (STARTS | PARTS).items():
        path = path.replace(new, old)
    block, _, letter = path.rpartition(".attention.to_")
    return [(f"{block}{FUSED}"[:-1], "qkv".index(letter[0]) * rows, rows)] if block else [(path[:-1], 0, rows)]


def transformer_of_original(state: State, module: nn.Module) -> State:
    """Convert original names to diffusers' names, and split fused tensors into query, key and value.

    Tensors with diffusers' names are kept.
    """
    converted: State = {}
    for found, tensor in state.items():
        name = found
        for start, new in STARTS.items():
            name = new + name.removeprefix(start) if name.startswith(start) else name
        for part, new in PARTS.items():
            name = name.replace(part, new)
        rows = tensor.shape[0] // 3 if FUSED in name else 0
        for number, letter in enumerate("qkv" if rows else ""):
            converted[name.replace(FUSED, f".attention.to_{letter}.")] = tensor[number * rows : (number + 1) * rows]
        if not rows:
            converted[name] = tensor
    return converted
