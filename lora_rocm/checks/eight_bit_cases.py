"""Calls of the kernels around products in eight bits, for ``kernel_check``. Both implementations give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.eight_bit import CODES, INT8, scaled_rows, scaled_sums, turned
from lora_rocm.kernels.rotation import GROUPS

SEED, ROWS, WIDTH = 23, 9, 2304
"""The width is longer than one block of the kernel, and not a multiple of a block."""
SHAPES = ((144, 336), (128, 128), (16, 1168))


def rows_of(name: str, implementation: Implementation, device: torch.device) -> dict[str, Tensor]:
    """Codes and scales of rows with zeros only, tiny, large and faulty numbers; with factors, rotated, and plain."""
    rng = torch.Generator().manual_seed(SEED)
    x_MN, factor_N1 = torch.randn(ROWS, WIDTH, generator=rng), torch.rand(WIDTH, 1, generator=rng) + 0.01
    x_MN[:4] *= torch.tensor([0.0, 1e-20, 1e20, 1.0])[:, None]
    x_MN[3, 1::3] *= 1e-3
    code = next(code for code in CODES.values() if code.name == name)
    x_MN[8] = (20 * x_MN[8]).clamp(-code.largest, code.largest)
    x_MN[8, 0] = code.largest  # so that the scale is 1, and many numbers are halfway between two codes
    x_MN, factor_N1 = x_MN.to(device, torch.bfloat16), factor_N1.to(device)
    found: dict[str, Tensor] = {}
    groups = GROUPS if code is INT8 else ()
    for with_factor, group in ((False, 0), (True, 0), *((False, group) for group in groups)):
        codes_MN, scale_M1 = scaled_rows(x_MN, code, factor_N1 if with_factor else None, group, implementation)
        title = f"{with_factor} {group}"
        found |= {f"codes {title}": codes_MN, f"scales {title}": scale_M1.contiguous()}
    x_MN[4, 5], x_MN[5, 7] = torch.nan, torch.inf
    for group in (0, *groups[-1:]):
        _, scale_M1 = scaled_rows(x_MN[:, : WIDTH // 2], code, None, group, implementation)
        found[f"finite scales {group}"] = scale_M1.isfinite()
    return found


def turned_of(implementation: Implementation, device: torch.device) -> dict[str, Tensor]:
    """Transposed codes of matrices with sizes that are not multiples of a tile, and with a tile's size."""
    rng = torch.Generator().manual_seed(SEED)
    drawn = [torch.randint(-128, 128, shape, generator=rng).to(device, torch.int8) for shape in SHAPES]
    return {str(tuple(codes.shape)): turned(codes, implementation) for codes in drawn}


def sums_of(implementation: Implementation, device: torch.device) -> dict[str, Tensor]:
    """Scaled sums with and without factors and a bias, and rotated."""
    rng = torch.Generator().manual_seed(SEED)
    sums_MN = torch.randint(-(2**30), 2**30, (ROWS, WIDTH), generator=rng).to(device, torch.int32)
    scale_M1, factor_N1 = torch.rand(ROWS, 1, generator=rng).to(device), torch.rand(WIDTH, 1, generator=rng).to(device)
    bias_N = (1e9 * torch.randn(WIDTH, generator=rng)).to(device, torch.bfloat16)
    how = {"plain": (None, None, 0), "all": (factor_N1, bias_N, 0)}
    how |= {f"rotated {group}": (None, None, group) for group in GROUPS}
    return {
        title: scaled_sums(sums_MN, scale_M1, factor, bias, torch.bfloat16, group, implementation)
        for title, (factor, bias, group) in how.items()
    }
