"""Calls of the kernels of packed layers, for ``kernel_check``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.eight_bit import CODES, INT8, scaled_rows, scaled_sums, turned
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.rotation import GROUPS

SEED, ROWS, WIDTH, SHORT, LONGER = 23, 9, 2304, 1024, 16
"""The width is longer than one block of the kernel, and not a multiple of a block. A short row fits into a block.

Rows are part of rows that are longer by ``LONGER``.
"""
SHAPES = ((144, 336), (128, 128), (16, 1168))


EXACT = {
    "int8": ("eight_bit.scaled_rows: int8", "eight_bit.turned: int8", "eight_bit.scaled_sums: int8"),
    "fp8": ("eight_bit.scaled_rows: fp8", "eight_bit.turned: int8"),
}
"""The kernels that ``codes_of`` runs, by format."""


def codes_of(name: str, implementation: Implementation, device: torch.device) -> dict[str, Tensor]:
    """Return named codes, scales, transposed codes and scaled sums.

    Both implementations give the same bits. The rows have zeros only, tiny, large and faulty numbers. They are scaled
    with factors, rotated, and plain. Transposed matrices have a tile's size, and sizes that no tile divides. Only int8
    has sums to be scaled.
    """
    found: dict[str, Tensor] = {}
    code = next(code for code in CODES.values() if code.name == name)
    groups = GROUPS if code is INT8 else ()
    # Rows
    rng = torch.Generator().manual_seed(SEED)
    x_MN, factor_N1 = torch.randn(ROWS, WIDTH + LONGER, generator=rng), torch.rand(WIDTH, 1, generator=rng) + 0.01
    x_MN[:4] *= torch.tensor([0.0, 1e-20, 1e20, 1.0])[:, None]
    x_MN[3, 1::3] *= 1e-3
    x_MN[8] = (20 * x_MN[8]).clamp(-code.largest, code.largest)
    x_MN[8, 0] = code.largest  # so that the scale is 1, and many numbers are halfway between two codes
    x_MN, factor_N1 = x_MN.to(device, torch.bfloat16)[:, :WIDTH], factor_N1.to(device)
    short = [(SHORT, False, group) for group in (0, *groups[:1])]
    for width, with_factor, group in (
        (WIDTH, False, 0), (WIDTH, True, 0), *((WIDTH, False, group) for group in groups), *short,
    ):  # fmt: skip
        factor = factor_N1 if with_factor else None
        codes_MN, scale_M1 = scaled_rows(x_MN[:, :width], code, factor, group, implementation)
        title = f"{width} {with_factor} {group}"
        found |= {f"codes {title}": codes_MN, f"scales {title}": scale_M1.contiguous()}
    x_MN[4, 5], x_MN[5, 7] = torch.nan, torch.inf
    for group in (0, *groups[-1:]):
        _, scale_M1 = scaled_rows(x_MN[:, : WIDTH // 2], code, None, group, implementation)
        found[f"finite scales {group}"] = scale_M1.isfinite()
    # Transposed codes
    rng = torch.Generator().manual_seed(SEED)
    for shape in SHAPES:
        drawn = torch.randint(-128, 128, shape, generator=rng).to(device, torch.int8)
        found[f"turned {shape}"] = turned(drawn, implementation)
    if code is not INT8:
        return found
    # Scaled sums: plain, with factors and a bias, and rotated
    rng = torch.Generator().manual_seed(SEED)
    sums_MN = torch.randint(-(2**30), 2**30, (ROWS, WIDTH), generator=rng).to(device, torch.int32)
    scale_M1, factor_N1 = torch.rand(ROWS, 1, generator=rng).to(device), torch.rand(WIDTH, 1, generator=rng).to(device)
    bias_N = (1e9 * torch.randn(WIDTH, generator=rng)).to(device, torch.bfloat16)
    given = (sums_MN, scale_M1)
    found["sums"] = scaled_sums(*given, None, None, torch.bfloat16, 0, implementation)
    found["sums with factors"] = scaled_sums(*given, factor_N1, bias_N, torch.bfloat16, 0, implementation)
    for group in groups:
        found[f"sums rotated {group}"] = scaled_sums(*given, None, None, torch.bfloat16, group, implementation)
    return found


def packed_products(
    name: str,
    implementation: Implementation,
    norm: None,
    *inputs: Tensor,
    outputs: Sequence[int] = (64, 64),
    compute: str = "bf16",
) -> tuple[Tensor, ...]:
    """Return the products of inputs with packed layers, which have these numbers of outputs."""
    found = list[Tensor]()
    for x, width in zip(inputs, outputs, strict=False):
        rng = torch.Generator(x.device).manual_seed(SEED)
        weight_OI = torch.randn(width, x.shape[1], generator=rng, device=x.device).bfloat16()
        layer = nn.Linear(x.shape[1], width, bias=False, device="meta")
        layer.weight = nn.Parameter(weight_OI.to(x.dtype), requires_grad=False)
        packed = quantised(name, "", compute).packed(layer)
        packed.implementation = implementation
        found.append(packed(x))
    return tuple(found)
