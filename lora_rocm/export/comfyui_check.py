"""Applies a LoRA file in kohya's format by ComfyUI's rules: an independent reader that verifies exports.

The rules are from ComfyUI's ``comfy/lora.py`` and ``comfy/weight_adapter``:
LoRA: the update is the product of the flattened matrices; its scale is alpha / rank, or 1 without an alpha.
DoRA: the adapted weight is multiplied by ``dora_scale / norm``. The norm is per output row if dora_scale and weight
have the same first size.
LoKr (``lokr.py``): the update is the Kronecker product of two factors. Each factor is a matrix or itself a product; the
scale is alpha / rank if any factor is a product, else 1.
LoHa (``loha.py``): the update is the elementwise product of two products; its scale is alpha / rank.
OFT (``oft.py``): blocks of rows are rotated. alpha limits the rotation, and 0 means no limit.
IA3: ComfyUI does not read it. The rule of LyCORIS (``lycoris/modules/ia3.py``) and A1111 is used: ``(1 + weight) W``
for each output.

DoRA (arXiv 2402.09353, eq. 5) and LyCORIS use the norm of the adapted weight. ComfyUI and Forge use the base weight's
norm if it is per output row, so their results deviate a little. (ComfyUI pull request 15458 would change that.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
FACTORS = (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight"))
SUFFIXES = (*FACTORS[0], *FACTORS[1], *LOKR, *LOHA, "oft_blocks", "weight", "on_input", "alpha", "dora_scale")


def apply_comfy(
    tensors: Mapping[str, Tensor], base_weights: Mapping[str, Tensor], *, norm_of_base: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight that the file changes, with the file applied, in float32.

    Args:
        tensors: tensors of a file in kohya's format.
        base_weights: LoRA key ("lora_unet_input_blocks_4_1_proj_in") -> base weight; looked up one at a time.
        norm_of_base: apply DoRA by ComfyUI's current rule instead of DoRA's definition.

    Yields:
        (LoRA key, weight with the file applied at strength 1).

    Raises:
        KeyError: a key of the file matches no weight of the model. ComfyUI would only log it.
    """
    # Refuse keys of unknown modules
    known = {f"{key}.{suffix}" for key in base_weights for suffix in SUFFIXES}
    strays = sorted(name for name in tensors if name not in known)
    if strays:
        raise KeyError(strays[0])
    for key in base_weights:
        parts = {suffix: tensors[f"{key}.{suffix}"].float() for suffix in SUFFIXES if f"{key}.{suffix}" in tensors}
        if not parts:
            continue
        weight = base_weights[key].float()
        # The file was read to the CPU, so .item() does not wait for a GPU
        alpha = parts["alpha"].item() if "alpha" in parts else None
        if any(suffix in parts for suffix in LOKR):
            patched = weight + _kronecker(parts, alpha).reshape(weight.shape)
        elif LOHA[0] in parts:
            one, other = (torch.mm(parts[f"hada_w{n}_a"], parts[f"hada_w{n}_b"]) for n in (1, 2))
            scale = 1.0 if alpha is None else alpha / parts["hada_w1_b"].shape[0]
            patched = weight + (one * other * scale).reshape(weight.shape)
        elif "oft_blocks" in parts:
            patched = _rotated(weight, parts["oft_blocks"], alpha or 0.0)
        elif "on_input" in parts:
            patched = weight * (1 + parts["weight"].reshape(-1, *[1] * (weight.ndim - 1)))
        elif (names := next((pair for pair in FACTORS if pair[0] in parts), None)) is not None:
            up, down = (parts[name] for name in names)
            scale = 1.0 if alpha is None else alpha / down.shape[0]
            patched = weight + torch.mm(scale * up.flatten(1), down.flatten(1)).reshape(weight.shape)
        else:
            continue
        # DoRA comes last, on the adapted weight
        dora_scale = parts.get("dora_scale")
        if dora_scale is not None:
            patched = _decompose(weight, patched, dora_scale, norm_of_base)
        yield key, patched


def apply_norms(
    tensors: dict[str, Tensor], base_norms: Mapping[str, tuple[Tensor, Tensor | None]]
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield (key, weight, bias) of each trained norm with the file applied, and remove it from ``tensors``.

    The results are float32. ``comfy/lora.py``: "<key>.w_norm" is added to the weight, "<key>.b_norm" to the bias.

    Raises:
        KeyError: a key of the file matches no norm of the model.
    """
    found = [name for name in tensors if name.endswith((".w_norm", ".b_norm"))]
    if strays := sorted(name for name in found if name.rpartition(".")[0] not in base_norms):
        raise KeyError(strays[0])
    for key in sorted({name.rpartition(".")[0] for name in found}):
        changed = [
            base + tensors.pop(f"{key}.{role}").float() if f"{key}.{role}" in tensors and base is not None else base
            for role, base in zip(("w_norm", "b_norm"), base_norms[key], strict=True)
        ]
        assert changed[0] is not None, "a norm has a weight"
        yield key, changed[0], changed[1]


def _kronecker(parts: Mapping[str, Tensor], alpha: float | None) -> Tensor:
    factors, rank = [], None
    for name in ("lokr_w1", "lokr_w2"):
        if name in parts:
            factors.append(parts[name])
        else:
            rank = parts[f"{name}_b"].shape[0]
            factors.append(torch.mm(parts[f"{name}_a"], parts[f"{name}_b"]))
    w1, w2 = factors
    if w2.ndim == 4:
        w1 = w1[:, :, None, None]
    return torch.kron(w1, w2.contiguous()) * (1.0 if alpha is None or rank is None else alpha / rank)


def _rotated(weight: Tensor, blocks: Tensor, constraint: float) -> Tensor:
    skew = blocks - blocks.transpose(1, 2)
    norm = float(torch.linalg.vector_norm(skew)) + 1e-8
    if 0 < constraint < norm:
        skew = skew * (constraint / norm)
    eye = torch.eye(blocks.shape[1])
    rotation = (eye + skew) @ (eye - skew).inverse()
    rows = weight.reshape(blocks.shape[0], blocks.shape[1], -1)
    return torch.einsum("knm,kni->kmi", rotation, rows).reshape(weight.shape)


def _decompose(weight: Tensor, patched: Tensor, dora_scale: Tensor, norm_of_base: bool) -> Tensor:
    if dora_scale.shape[0] == weight.shape[0]:
        measured = weight if norm_of_base else patched
        norm = measured.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.ndim - 1))
    else:
        norm = patched.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *[1] * (weight.ndim - 2))
    scaled: Tensor = patched * (dora_scale / (norm + torch.finfo(weight.dtype).eps))
    return scaled
