"""The memory layouts in which attention gets its inputs and the gradient of its output, in training.

Torch's cuDNN attention keeps one plan of its backward pass for each shape and layout of q, k and v. The plan contains
the strides of the output's gradient, but the key under which it is kept does not (``run_cudnn_SDP_bprop`` in
aten/src/ATen/native/cudnn/MHA.cpp, read in November 2026). A second gradient with other strides is therefore read at
wrong addresses. FLUX.1 of diffusers gives two such layouts in one pass: the output of a block with one stream is
concatenated with the output of its MLP, so its gradient is a part of wider rows. Our blocks give one layout
(``kernels.packed_gradient``).

Dimensions: B batch, H heads, S tokens, D width of a head.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["heads", "tokens", "wide", "expanded", "other"]
"""Layout of a tensor of shape [B, H, S, D].

heads: contiguous. tokens: contiguous as [B, S, H, D], as a projection's output. wide: like tokens, but each token's
numbers are a part of a longer row. expanded: some numbers share an address.
"""
WIDER = 3
"""Length of the rows of a wide tensor that ``laid_out`` makes, in lengths of the part that is used."""


class InputLayouts(NamedTuple):
    """Layouts of queries, keys and values."""

    query: Layout
    key: Layout
    value: Layout


IN_MODELS: dict[InputLayouts, tuple[Layout, ...]] = {
    InputLayouts("heads", "heads", "heads"): ("heads",),
    InputLayouts("tokens", "tokens", "tokens"): ("tokens",),
    InputLayouts("tokens", "tokens", "wide"): ("tokens",),
    InputLayouts("tokens", "wide", "wide"): ("tokens",),
    InputLayouts("wide", "wide", "wide"): ("tokens",),
}
"""Layouts of the output's gradient that a model gives for the same inputs, by the layouts of the inputs.

The models of all families together; ``tests/checks/layouts_seen.py`` records them. A route is tried with all of them.
"""


def layout_of(tensor_BHSD: Tensor) -> Layout:
    """Return the layout of a tensor. Dimensions of length 1 do not matter."""
    if any(count > 1 and not stride for count, stride in zip(tensor_BHSD.shape, tensor_BHSD.stride(), strict=True)):
        return "expanded"
    if tensor_BHSD.transpose(1, 2).is_contiguous():
        return "tokens"
    if tensor_BHSD.is_contiguous():
        return "heads"
    _, heads, tokens, width = tensor_BHSD.shape
    of_batch, of_head, of_token, of_number = tensor_BHSD.stride()
    in_rows = of_number == 1 and of_token >= heads * width and (heads == 1 or of_head == width)
    return "wide" if in_rows and (len(tensor_BHSD) == 1 or of_batch == tokens * of_token) else "other"


def laid_out(values_BHSD: Tensor, layout: Layout) -> Tensor:
    """Return a new tensor with these values in a layout.

    Raises:
        ValueError: the layout cannot hold any values.
    """
    batch, heads, tokens, width = values_BHSD.shape
    if layout == "heads":
        return values_BHSD.clone(memory_format=torch.contiguous_format)
    if layout not in ("tokens", "wide"):
        raise ValueError(f"a tensor with {layout} layout cannot hold any values")
    rows_BSN = values_BHSD.new_zeros(batch, tokens, heads * width * (WIDER if layout == "wide" else 1))
    found: Tensor = rows_BSN[..., : heads * width].unflatten(-1, (heads, width)).transpose(1, 2)
    found.copy_(values_BHSD)
    return found
