"""Quantised storage of frozen linear layers in plain PyTorch: nf4, and int8 and fp8 with a scale per row.

nf4 is the format of bitsandbytes (QLoRA, arXiv 2305.14314). Each value is one of 16 levels, times the largest magnitude
of its block of 64 values. The magnitudes are quantised again, in blocks of 256, by the dynamic map of arXiv 2110.02861.

A plain cast to fp8 loses small weights (values of 0.001 keep half of their bits), so fp8 has a scale per row too.

Dimensions: O outputs, I inputs, N values, K blocks of 64.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.base_product import BaseProduct, UnpackedProduct
from lora_rocm.kernels.eight_bit import CODES, EightBitProduct
from lora_rocm.kernels.eight_bit_library import MULTIPLE
from lora_rocm.kernels.nf4_codes import BLOCK, LEVELS, TINY, NearestLevels, largest_of_rows, pairs_of, pieces_of
from lora_rocm.kernels.rotation import group_of, rotated
from lora_rocm.kernels.weight_format import DENSE, PackedLinear, WeightFormat, joined, unpacked_product

NESTED_BLOCK = 256


@dataclass(frozen=True)
class QuantisedLinears(ABC):
    """A format that stores linear layers with fewer bits if their path matches ``layers``. Other layers stay dense.

    layers: regular expression, searched for in the layer's path within its component.
    """

    layers: str

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def packed(self, layer: nn.Linear) -> PackedLinear: ...

    @abstractmethod
    def stored_bytes(self, layer: nn.Linear, dtype: torch.dtype) -> int:
        """Bytes that ``packed`` stores for a layer of this dtype, without the bias."""

    @abstractmethod
    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None: ...

    def product(self, layers: Sequence[PackedLinear], dtype: torch.dtype) -> BaseProduct:
        return unpacked_product(layers, dtype)

    def unpacks(self, layer: PackedLinear) -> bool:
        return True

    def takes(self, layer: nn.Linear) -> bool:
        """Whether the format supports a layer of this size."""
        return True

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        chosen = self.chosen(component).values()
        saved = sum(layer.weight.numel() * dtype.itemsize - self.stored_bytes(layer, dtype) for layer in chosen)
        return DENSE.num_bytes(component, dtype) - saved

    def chosen(self, component: nn.Module) -> Mapping[str, nn.Linear]:
        linears = {path: layer for path, layer in component.named_modules() if type(layer) is nn.Linear}
        return {path: layer for path, layer in linears.items() if re.search(self.layers, path) and self.takes(layer)}


@dataclass(frozen=True)
class ScaledRows(QuantisedLinears):
    """int8 or fp8 with a float32 scale per row, which maps the row's largest magnitude to the largest storable number.

    stored: torch.int8 or torch.float8_e4m3fn.
    multiplies: whether large inputs are multiplied in eight bits (``EightBitProduct``), and not by the dense weight.
    rotates: whether the layers that are multiplied so store rotated rows (``rotation``).
    """

    stored: torch.dtype = torch.int8
    multiplies: bool = False
    rotates: bool = False

    @property
    def name(self) -> str:
        return "int8" if self.stored is torch.int8 else "fp8"

    def packed(self, layer: nn.Linear) -> PackedLinear:
        integer, weight_OI = self.stored is torch.int8, layer.weight.detach()
        largest = torch.iinfo(self.stored).max if integer else torch.finfo(self.stored).max
        # a tensor, because CUDA replaces a division by a Python number with a product by the reciprocal
        divisor = torch.tensor(float(largest), device=weight_OI.device)
        stored_OI = torch.empty_like(weight_OI, dtype=self.stored)
        pieces, group = pieces_of(weight_OI), self.group(layer)
        scale_O1 = torch.empty_like(weight_OI[:, :1], dtype=torch.float32) if group else _scales(weight_OI, divisor)
        scaled_RI = torch.empty_like(weight_OI[pieces[0]], dtype=torch.float32)
        for rows in pieces:
            scaled = scaled_RI[: rows.stop - rows.start]
            scaled.copy_(rotated(weight_OI[rows], group) if group else weight_OI[rows])
            if group:
                scale_O1[rows] = _scales(scaled, divisor)
            scaled.div_(scale_O1[rows])
            stored_OI[rows] = (scaled.round_() if integer else scaled).clamp_(-largest, largest)
        return self.of_codes(layer, stored_OI, scale_O1)

    def of_codes(self, layer: nn.Linear, stored_OI: Tensor, scale_O1: Tensor) -> PackedLinear:
        """Return a packed layer with these stored numbers (of dtype ``stored``) and float32 scales."""
        return PackedLinear(layer, self, stored_OI, weight_scale=scale_O1)

    def product(self, layers: Sequence[PackedLinear], dtype: torch.dtype) -> BaseProduct:
        if any(map(self.unpacks, layers)):
            return unpacked_product(layers, dtype)
        stored = UnpackedProduct(partial(joined, layers, dtype, self._write_stored))
        return EightBitProduct(layers, CODES[self.stored], dtype, stored, self.group(layers[0]))

    def unpacks(self, layer: nn.Linear) -> bool:
        return not self.multiplies or layer.in_features % MULTIPLE > 0 or layer.out_features % MULTIPLE > 0

    def group(self, layer: nn.Linear) -> int:
        """Return the number of inputs of a layer that are rotated together, or 0."""
        return 0 if not self.rotates or self.unpacks(layer) else group_of(layer.in_features)

    def stored_bytes(self, layer: nn.Linear, dtype: torch.dtype) -> int:
        return layer.weight.numel() * self.stored.itemsize + layer.out_features * torch.float32.itemsize

    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None:
        group, scale_O1 = self.group(layer), layer.get_buffer("weight_scale")
        if not group:
            self._write_stored(layer, out_OI, implementation)
            return
        # Rotated rows are for export and checks, so there is no kernel for them: products read the stored numbers.
        for rows in pieces_of(out_OI):
            out_OI[rows] = rotated(layer.weight[rows] * scale_O1[rows], group)

    def _write_stored(self, layer: PackedLinear, out_OI: Tensor, implementation: Implementation | None = None) -> None:
        """Write the numbers as they are stored, which may be rotated, rounded to the dtype of ``out_OI``."""
        implementation, scale_O1 = implementation or layer.implementation, layer.get_buffer("weight_scale")
        if backend.decided(implementation, lambda: f"quantised.unpack: {self.name}") == "triton":
            if backend.launches(implementation, out_OI, lambda: f"quantised.unpack: {self.name}"):
                from lora_rocm.kernels.unpack_triton import launch_rows

                codes_OI = layer.weight if self.stored is torch.int8 else layer.weight.view(torch.uint8)
                launch_rows(codes_OI, scale_O1, out_OI)
        elif self.stored is torch.int8:
            torch.mul(layer.weight, scale_O1, out=out_OI)
        else:
            out_OI.copy_(layer.weight.view(self.stored))
            torch.mul(out_OI, scale_O1, out=out_OI)


def _scales(weight_OI: Tensor, divisor: Tensor) -> Tensor:
    return largest_of_rows(weight_OI)[:, None].clamp_(min=TINY).div_(divisor)


@dataclass(frozen=True)
class Nf4(QuantisedLinears):
    """bitsandbytes' nf4 with double quantisation: 4.127 bits per value.

    Two values share a byte, the first in its upper half. A block's magnitude is ``code[byte] * nested + offset``.
    ``table`` contains the two levels of each possible byte, rounded to the layer's dtype.
    """

    @property
    def name(self) -> str:
        return "nf4"

    def takes(self, layer: nn.Linear) -> bool:
        return layer.in_features % 2 == 0 and layer.weight.numel() % BLOCK == 0

    def packed(self, layer: nn.Linear) -> PackedLinear:
        pairs, absmax_K = pairs_of(layer.weight.detach())
        offset = _mean(absmax_K)
        nested_codes_K, nested = _nested(absmax_K - offset)
        code = torch.tensor(dynamic_map(), device=pairs.device)
        return self.of_codes(layer, pairs, nested_codes=nested_codes_K, nested=nested, offset=offset[None], code=code)

    def of_codes(self, layer: nn.Linear, pairs: Tensor, **magnitudes: Tensor) -> PackedLinear:
        """Return a packed layer with these pairs of codes.

        ``magnitudes``: the buffers that the method ``magnitudes`` reads.
        """
        levels = torch.tensor(LEVELS, dtype=layer.weight.dtype, device=pairs.device)
        table = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
        packed = pairs.view(layer.out_features, -1)
        return PackedLinear(layer, self, packed, table=table, **magnitudes)

    def stored_bytes(self, layer: nn.Linear, dtype: torch.dtype) -> int:
        nested_blocks = -(-layer.weight.numel() // (BLOCK * NESTED_BLOCK))
        tables = 256 * (2 * dtype.itemsize + torch.float32.itemsize)
        nested = nested_blocks * (NESTED_BLOCK + torch.float32.itemsize) + torch.float32.itemsize
        return layer.weight.numel() // 2 + nested + tables

    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None:
        table, pairs = layer.get_buffer("table"), layer.weight.view(torch.uint8)
        if backend.decided(implementation, lambda: f"quantised.unpack: {self.name}") == "triton":
            if backend.launches(implementation, out_OI, lambda: f"quantised.unpack: {self.name}"):
                from lora_rocm.kernels.unpack_triton import launch_nf4

                codes_K, code = layer.get_buffer("nested_codes"), layer.get_buffer("code")
                nested, offset = layer.get_buffer("nested"), layer.get_buffer("offset")
                launch_nf4(pairs, table, codes_K, code, nested, offset, out_OI)
            return
        pair = torch.int32 if table.dtype.itemsize == 2 else torch.int64  # both values of a byte as one number
        found_N = table.view(pair).view(-1).index_select(0, pairs.view(-1).int()).view(table.dtype)
        magnitude_K1 = self.magnitudes(layer)[: len(found_N) // BLOCK, None]
        torch.mul(found_N.view(-1, BLOCK), magnitude_K1, out=out_OI.view(-1, BLOCK))

    def magnitudes(self, layer: nn.Module) -> Tensor:
        """Return the largest magnitude of each block, float32 [K]. K is padded to a multiple of ``NESTED_BLOCK``."""
        found_K = layer.get_buffer("code").index_select(0, layer.get_buffer("nested_codes").int())
        found_K.view(-1, NESTED_BLOCK).mul_(layer.get_buffer("nested")[:, None])
        return found_K.add_(layer.get_buffer("offset"))


def _mean(values_K: Tensor) -> Tensor:
    """Return the mean of numbers >= 0. It is summed in integers, so its bits do not depend on the number of threads."""
    whole = 2.0**40 / values_K.max().clamp(min=TINY).double()
    return ((values_K.double() * whole).round().long().sum() / (whole * len(values_K))).float()


def _nested(values_K: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values by the dynamic map, in blocks of 256.

    Return the codes (uint8, padded to whole blocks) and the largest magnitude of each block.
    """
    short = -len(values_K) % NESTED_BLOCK
    blocks_MB = torch.nn.functional.pad(values_K, (0, short)).view(-1, NESTED_BLOCK)
    absmax_M = blocks_MB.abs().amax(dim=1)
    scaled_MB = blocks_MB / absmax_M.clamp(min=TINY)[:, None]
    return NearestLevels(dynamic_map(), scaled_MB.numel(), scaled_MB.device)(scaled_MB.view(-1)), absmax_M


@cache
def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the signed dynamic map: seven decades, each with twice as many values as the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(values))


def quantised(name: str, layers: str, compute: str = "bf16", *, rotates: bool = True) -> WeightFormat:
    """Return the weight format for a value of ``model.quantization``, and its product for one of ``model.compute``.

    Args:
        name: value of ``model.quantization``.
        layers: see ``QuantisedLinears``.
        compute: "bf16", or ``name`` for products in eight bits.
        rotates: whether layers that are multiplied in int8 are rotated. fp8 has no use for it: its steps grow with the
            numbers.
    """
    formats: dict[str, Any] = {
        "none": lambda: DENSE,
        "int8": lambda: ScaledRows(layers, multiplies=compute == name, rotates=rotates and compute == name),
        "fp8": lambda: ScaledRows(layers, torch.float8_e4m3fn, multiplies=compute == name),
        "nf4": lambda: Nf4(layers),
    }
    assert compute in ("bf16", name), "a recipe's rule refuses others"
    found: WeightFormat = formats[name]()
    return found
