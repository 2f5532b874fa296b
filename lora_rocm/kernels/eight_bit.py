"""Products of a frozen layer in eight bits: inputs and gradients get a scale per row, and codes are multiplied.

The layer's codes are multiplied as they are stored, each row with its own scale s (``quantised.ScaledRows``):
y = (q(x) W^T) * scale of x * s, where q rounds each row of x to int8 or e4m3fn, its largest magnitude to the largest
storable number. Backward: dx = (q(dy * s) W) * scale of dy * s, so the weights are not rounded again.

One large number makes the step of int8 larger for its whole row. So the inputs of int8 layers are rotated
(``rotation``). The codes are of W R, where R is its own inverse: y = q(x R) (W R)^T, and dx = (q(dy) W R) R.

The eager implementation multiplies the same codes in float32 on the CPU, and in the input's dtype on a GPU. All codes
are exact in it.

Dimensions: M rows (all leading dimensions), I inputs, O outputs, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_rocm.kernels import backend, eight_bit_library
from lora_rocm.kernels.backend import Implementation, note_shared
from lora_rocm.kernels.base_product import BaseProduct, Outputs
from lora_rocm.kernels.rotation import rotated, rotated_few
from lora_rocm.kernels.weight_format import PackedLinear

TINY = 1e-30  # largest magnitude of a row of zeros


@dataclass(frozen=True)
class EightBitCode:
    """An 8-bit number format. name: "int8" or "fp8". largest: its largest number that is used."""

    name: str
    stored: torch.dtype
    largest: float


INT8, FP8 = EightBitCode("int8", torch.int8, 127.0), EightBitCode("fp8", torch.float8_e4m3fn, 448.0)
CODES = {code.stored: code for code in (INT8, FP8)}


def scaled_rows(
    x_MN: Tensor, code: EightBitCode, factor_N1: Tensor | None, group: int, implementation: Implementation
) -> tuple[Tensor, Tensor]:
    """Return the codes of rows (as int8 bytes [M, N]), and the float32 scale of each row [M, 1].

    A row with a number that is not finite gets a scale that is not finite, so that the fault stays visible.

    Args:
        x_MN: numbers.
        code: the format.
        factor_N1: float32 factors of the columns, multiplied first, or None.
        group: columns that are rotated together before they are rounded, or 0.
        implementation: implementation of the kernel.
    """
    name = f"eight_bit.scaled_rows: {code.name}"
    x_MN = x_MN if x_MN.stride(1) == 1 else x_MN.contiguous()
    scale_M1 = x_MN.new_empty(eight_bit_library.ceiling(len(x_MN)), 1, dtype=torch.float32)[: len(x_MN)]
    if backend.decided(implementation, lambda: name) == "triton":
        codes_MN = x_MN.new_empty(x_MN.shape, dtype=torch.int8)
        if backend.launches(implementation, x_MN, lambda: name):
            from lora_rocm.kernels.eight_bit_triton import launch_rows

            launch_rows(x_MN, factor_N1, codes_MN, scale_M1, code.largest, TINY, group)
        return codes_MN, scale_M1
    value_MN = x_MN.float() if factor_N1 is None else x_MN.float() * factor_N1.view(-1)
    value_MN = rotated(value_MN, group)
    peak_M1 = value_MN.abs().amax(dim=1, keepdim=True).clamp_(min=TINY)
    largest = torch.full_like(peak_M1, code.largest)  # a tensor, because CUDA would multiply by a reciprocal
    torch.div(peak_M1, largest, out=scale_M1)
    value_MN = value_MN * largest.div_(peak_M1)
    value_MN = value_MN.round_() if code is INT8 else value_MN
    codes_MN = value_MN.to(code.stored).view(torch.int8)
    return codes_MN if code is INT8 else eight_bit_library.as_fnuz(codes_MN), scale_M1  # no zero has a sign


def turned(codes_NK: Tensor, implementation: Implementation) -> Tensor:
    """Return the transposed codes [K, N] in new memory. Its size does not depend on the samples."""
    name = "eight_bit.turned: int8"
    if backend.decided(implementation, lambda: name) == "eager":
        return note_shared(codes_NK.t().contiguous())
    turned_KN = note_shared(codes_NK.new_empty(codes_NK.shape[::-1]))
    if backend.launches(implementation, codes_NK, lambda: name):
        from lora_rocm.kernels.eight_bit_triton import launch_turn

        launch_turn(codes_NK, turned_KN)
    return turned_KN


def scaled_sums(
    sums_MN: Tensor,
    scale_M1: Tensor,
    factor_N1: Tensor | None,
    bias_N: Tensor | None,
    dtype: torch.dtype,
    group: int,
    implementation: Implementation,
) -> Tensor:
    """Return ``sums_MN * scale_M1 * factor_N1 + bias_N`` in ``dtype``, computed in float32.

    ``group``: columns of the products that are rotated together before the bias is added, or 0.
    """
    name = "eight_bit.scaled_sums: int8"
    if sums_MN.dtype is torch.int32 and backend.decided(implementation, lambda: name) == "triton":
        made_MN = sums_MN.new_empty(sums_MN.shape, dtype=dtype)
        if backend.launches(implementation, sums_MN, lambda: name):
            from lora_rocm.kernels.eight_bit_triton import launch_sums

            launch_sums(sums_MN, scale_M1, factor_N1, bias_N, made_MN, group)
        return made_MN
    found_MN = sums_MN.float() * scale_M1
    found_MN = found_MN if factor_N1 is None else found_MN.mul_(factor_N1.view(-1))
    found_MN = rotated(found_MN, group)
    return (found_MN if bias_N is None else found_MN.add_(bias_N)).to(dtype)


@dataclass(frozen=True)
class EightBitProduct:
    """The product with packed layers of ``ScaledRows`` that have the same input (``base_product.BaseProduct``).

    Inputs of few rows (``eight_bit_library.MIN_ROWS``) are multiplied by ``stored``, which takes no longer.

    stored: the product with the stored numbers of the layers, which are rotated if ``group`` is not 0.
    group: inputs that are rotated together, or 0.
    """

    layers: Sequence[PackedLinear]
    code: EightBitCode
    dtype: torch.dtype
    stored: BaseProduct
    group: int = 0

    def outputs(self, x: Tensor, bias_O: Tensor | None, rows: Sequence[int], needed: bool) -> Outputs:
        x_MI = x.reshape(-1, x.shape[-1])
        if len(x_MI) < eight_bit_library.MIN_ROWS:
            return self.stored.outputs(rotated_few(x, self.group), bias_O, rows, False)
        codes_MI, scale_M1 = scaled_rows(x_MI, self.code, None, self.group, self._implementation)
        biases = [None] * len(rows) if bias_O is None else bias_O.split(list(rows))
        made = [
            self._product(codes_MI, layer.weight, scale_M1, _scale(layer), bias, backward=False)
            for layer, bias in zip(self.layers, biases, strict=True)
        ]
        return [y_MO.view(*x.shape[:-1], y_MO.shape[1]) for y_MO in made], None

    def input_gradient(self, dy: Sequence[Tensor], kept_OI: Tensor | None) -> Tensor:
        shape = dy[0].shape
        if shape[:-1].numel() < eight_bit_library.MIN_ROWS:
            return rotated_few(self.stored.input_gradient(dy, None), self.group)
        total_MI: Tensor | None = None
        for layer, part in zip(self.layers, dy, strict=True):
            dy_MO = part.reshape(-1, part.shape[-1])
            codes_MO, scale_M1 = scaled_rows(dy_MO, self.code, _scale(layer), 0, self._implementation)
            codes_IO = turned(layer.weight, self._implementation)
            dx_MI = self._product(codes_MO, codes_IO, scale_M1, None, None, backward=True)
            total_MI = dx_MI if total_MI is None else total_MI.add_(dx_MI)
        assert total_MI is not None
        return total_MI.view(*shape[:-1], total_MI.shape[1])

    @property
    def _implementation(self) -> Implementation:
        return self.layers[0].implementation

    def _product(
        self,
        codes_MK: Tensor,
        codes_NK: Tensor,
        scale_M1: Tensor,
        scale_N1: Tensor | None,
        bias_N: Tensor | None,
        *,
        backward: bool,
    ) -> Tensor:
        """Return the scaled product of codes in the input's dtype; by torch's library if it was proven here.

        ``backward``: whether it is the gradient of the input, which is rotated back.
        """
        name, sums_MN = f"eight_bit.product: {self.code.name}", None
        if backend.decided(self._implementation, lambda: name) == "triton":
            backend.note_kernel(codes_MK, lambda: name)
            if eight_bit_library.multiplies_on(codes_MK.device):
                if self.code is FP8 and self.dtype is torch.bfloat16:
                    scales = (scale_M1, scale_N1)
                    return eight_bit_library.fp8_product(codes_MK, codes_NK, *scales, bias_N, fast=not backward)
                if self.code is INT8:
                    sums_MN = eight_bit_library.int8_product(codes_MK, codes_NK)
        if sums_MN is None:
            work = torch.float32 if codes_MK.device.type == "cpu" else self.dtype
            numbers_MK, numbers_NK = (codes.view(self.code.stored).to(work) for codes in (codes_MK, codes_NK))
            sums_MN = F.linear(numbers_MK, numbers_NK)
        group = self.group if backward else 0
        return scaled_sums(sums_MN, scale_M1, scale_N1, bias_N, self.dtype, group, self._implementation)


def _scale(layer: PackedLinear) -> Tensor:
    return layer.get_buffer("weight_scale")
