"""LoRA's A as further rows of a frozen weight: one product gives y = x W^T and h = x A^T, and one both input gradients.

The rows of A are the last rows of the memory of W. Each forward pass copies them from the leaves. This costs as much as
joining the leaves for a separate product, and no row can be stale after an update, a resume or an exchange of weights.
The leaves remain the trained weights; checkpoints, fingerprints and exports do not know these rows.

Compared with ``fused_lora`` the scale is applied to ``h B^T`` and not to ``h``. The results are equal up to the
rounding of ``h`` and the order of additions.

Dimensions: M rows of the input, I inputs, O outputs of all projections, R ranks of all projections, N = O and the
reserved rows, K = O + R rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels.base_product import unpacks_once
from lora_rocm.kernels.weight_format import dense_shape

ALIGNMENT = 64
"""N is a multiple of this number: each row of the outputs then begins at a multiple of 128 bytes."""
WIDTH = 8
"""K is a multiple of this number, because products of 16-bit numbers are faster if it is."""
RESERVED = "stacked_rows"
"""Name of the attribute of a layer with its number of reserved rows."""
_stacks: ContextVar[bool] = ContextVar("stacks", default=False)


@contextmanager
def rows_stacked(stacks: bool) -> Iterator[None]:
    """Return a context in which merged layers are made with reserved rows, if ``stacks`` is true."""
    token = _stacks.set(stacks)
    try:
        yield
    finally:
        _stacks.reset(token)


def reserved_rows(bases: Sequence[nn.Module], ranks: int) -> int:
    """Return the number of rows to reserve behind the weights of these layers; 0 outside of ``rows_stacked``.

    The number is stored as an attribute of the first layer, for ``reserved_bytes``.

    Args:
        bases: frozen layers with the same inputs, in the order of their weights.
        ranks: the sum of the ranks of all their adapters; 0 if no product can include their A.
    """
    if not _stacks.get() or not ranks:
        return 0
    outputs = sum(dense_shape(base)[0] for base in bases)
    reserved = _rounded(outputs + ranks, ALIGNMENT) - outputs
    setattr(bases[0], RESERVED, reserved)
    return reserved


def reserved_bytes(layer: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the rows that are reserved behind the weights of this layer and the layers merged with it."""
    rows = int(getattr(layer, RESERVED, 0))
    return rows * dense_shape(layer)[1] * dtype.itemsize if rows else 0


def stacked_projections(
    x: Tensor,
    weight_NI: Tensor | None,
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    scale: float,
    bias_O: Tensor | None = None,
    dense: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of several adapted projections of one input, as ``fused_lora.lora_projections`` does.

    Args:
        x: input [..., I].
        weight_NI: frozen weights of all projections by rows, then the reserved rows, which are overwritten; or None.
        a_RI: LoRA's A of each projection, in the order of the weights. Together they have at most N - O rows.
        b_OR: LoRA's B of each projection, in the order of the weights.
        scale: alpha / rank, the same for all projections.
        bias_O: frozen biases, concatenated as the weights, or None.
        dense: returns the weights with reserved rows in new memory, if ``weight_NI`` is None. It is called in each
            pass. In a context of ``unpacked_once`` the backward pass uses the weight of the recomputation.

    Returns:
        One output per projection. They are views of one tensor with rows of N numbers. The backward pass may overwrite
        the numbers behind the outputs.
    """
    outputs: tuple[Tensor, ...] = _StackedProjections.apply(x, weight_NI, bias_O, scale, dense, *a_RI, *b_OR)
    return outputs


class _StackedProjections(Function):
    @staticmethod
    def forward(
        ctx: Any,  # untyped: autograd's context
        x: Tensor,
        weight_NI: Tensor | None,
        bias_O: Tensor | None,
        scale: float,
        dense: Callable[[], Tensor] | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        a_RI, b_OR = leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]
        widths, ranks = [b.shape[0] for b in b_OR], [b.shape[1] for b in b_OR]
        x_MI = x.reshape(-1, x.shape[-1])
        # One product for base outputs and h
        used_NI = _with_rows(weight_NI, dense, a_RI, sum(widths))
        bias_N = None if bias_O is None else F.pad(bias_O, (0, len(used_NI) - len(bias_O)))
        z_MN = F.linear(x_MI, used_NI, bias_N)
        h_MR = z_MN.data[:, sum(widths) : sum(widths) + sum(ranks)]  # consumers may overwrite the outputs in place
        # Add the LoRA's outputs in place
        outputs = z_MN[:, : sum(widths)].split(widths, dim=1)
        for y, h, b in zip(outputs, h_MR.split(ranks, dim=1), b_OR, strict=True):
            y.addmm_(h, b.t(), alpha=scale)
        made_NI = used_NI if ctx.needs_input_grad[0] and unpacks_once() else None
        ctx.save_for_backward(x_MI, h_MR, made_NI if weight_NI is None else weight_NI, *leaves)
        ctx.how = scale, x.shape, dense
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:  # untyped: autograd's context
        x_MI, h_MR, weight_NI, *leaves = ctx.saved_tensors
        (scale, shape, dense), count = ctx.how, len(leaves) // 2
        a_RI, b_OR = leaves[:count], leaves[count:]
        ranks = [b.shape[1] for b in b_OR]
        dy_MO = [d.reshape(-1, d.shape[-1]) for d in dy]
        # First, because the gradient of h may overwrite h
        db_OR = [_product(d.t(), h, scale) for d, h in zip(dy_MO, h_MR.split(ranks, dim=1), strict=True)]
        # The gradient of h is written behind the gradients that it is multiplied with
        apart, joined_MK = _joined_gradients(dy_MO, h_MR, x_MI.shape[1] if ctx.needs_input_grad[0] else 0)
        width = sum(d.shape[1] for d in dy_MO[apart:])
        dh_MR = joined_MK[:, width : width + sum(ranks)]
        for dh, d, b in zip(dh_MR.split(ranks, dim=1), dy_MO, b_OR, strict=True):
            _product(d, b, scale, out=dh)
        dx = None
        if ctx.needs_input_grad[0]:
            outputs = sum(d.shape[1] for d in dy_MO)
            if weight_NI is None:
                weight_NI = _with_rows(None, dense, a_RI, outputs)
            alone, start = dy_MO[:apart], outputs - width
            dx = joined_MK @ weight_NI[start : start + joined_MK.shape[1]]
            for d, weight in zip(alone, weight_NI[:start].split([d.shape[1] for d in alone]), strict=True):
                dx.addmm_(d, weight)
            dx = dx.view(shape)
        return dx, None, None, None, None, *(dh_MR.t() @ x_MI).split(ranks), *db_OR


def _with_rows(
    weight_NI: Tensor | None, dense: Callable[[], Tensor] | None, a_RI: Sequence[Tensor], outputs: int
) -> Tensor:
    """Copy A behind the weights, and return them. This is the only place that writes the reserved rows."""
    if weight_NI is None:
        assert dense is not None
        weight_NI = dense()
    end = outputs + sum(map(len, a_RI))
    # ``data``: an earlier pass, saved for its backward pass, has the same rows, so its weights have not changed
    torch.cat([*a_RI], out=weight_NI.data[outputs:end])
    if end % WIDTH:
        weight_NI.data[end : _rounded(end, WIDTH)].zero_()
    return weight_NI


def _joined_gradients(dy_MO: Sequence[Tensor], h_MR: Tensor, inputs: int) -> tuple[int, Tensor]:
    """Return how many of the first gradients stay separate, and the others in one tensor with columns for h's gradient.

    If all gradients were written over the outputs, as by ``gated``, the memory of the outputs is this tensor: nothing
    is copied. Otherwise the last gradients are copied that are narrower than the input. For wider ones, a copy takes
    longer than adding the result of a further product.
    """
    outputs, ranks = sum(d.shape[1] for d in dy_MO), h_MR.shape[1]
    columns = _rounded(outputs + ranks, WIDTH)
    if _is_in_place(dy_MO, h_MR, outputs):
        start = int(h_MR.storage_offset()) - outputs
        return 0, h_MR.as_strided((len(h_MR), columns), h_MR.stride(), start)
    apart = len(dy_MO)
    while apart and dy_MO[apart - 1].shape[1] < inputs:
        apart -= 1
    copied = dy_MO[apart:]
    padding = columns - outputs - ranks
    room_MR = h_MR.new_empty(len(h_MR), ranks + padding)
    if padding:
        room_MR[:, ranks:].zero_()
    return apart, torch.cat([*copied, room_MR], dim=1) if copied else room_MR


def _is_in_place(dy_MO: Sequence[Tensor], h_MR: Tensor, outputs: int) -> bool:
    """Whether the gradients are in the memory of the outputs, each in the place of its output."""
    place = int(h_MR.storage_offset()) - outputs
    for d in dy_MO:
        same = d.untyped_storage()._cdata == h_MR.untyped_storage()._cdata and d.dtype == h_MR.dtype
        if not same or d.storage_offset() != place or d.stride() != h_MR.stride():
            return False
        place += d.shape[1]
    return True


def _product(first: Tensor, second: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return ``scale * first @ second``, in ``out`` if it is given. With beta 0, addmm does not read ``out``."""
    if out is None:
        if scale == 1:
            return first @ second
        out = first.new_empty(first.shape[0], second.shape[1])
    return out.addmm_(first, second, beta=0, alpha=scale)


def _rounded(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least ``number``."""
    return -(-number // multiple) * multiple
