"""Products of 8-bit matrices by torch's libraries: ``_scaled_mm`` (fp8) and ``_int_mm`` (int8).

On an AMD GPU both use hipBLASLt, regardless of the preferred library. So this is the only module that calls them. A
recipe with such products needs the profile "fast" (``rules/eight_bit_refusal.py``); ``require`` refuses at the start.

Dimensions: M rows, N columns, K summed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_rocm.device.hipblaslt import hipblaslt_is_off
from lora_rocm.hardware.eight_bit import HIPBLASLT_OFF, OF_NVIDIA, has_fnuz, refusal_of, refused
from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import gfx_of

INTEGER_PRODUCT = torch.ops.aten._int_mm
"""The operation of ``int8_product``, for which PyTorch counts no FLOPs."""
EIGHT_BIT_PRODUCTS = (INTEGER_PRODUCT, torch.ops.aten._scaled_mm)
"""The operations of this module's products."""
MULTIPLE = 16
"""K and N must be multiples of this number for fp8. For int8 multiples of 8 would do."""
MIN_ROWS = 17
"""Least M that ``_int_mm`` accepts (torch ATen/native/cuda/Blas.cpp). With fewer rows a product reads weights only."""
SCALES = 256
"""Scales are in memory of a multiple of this number, because CUTLASS reads them in whole tiles (pytorch#133334)."""
ZERO_OF_OTHER_SIGN = -128
"""The byte 0x80: -0 in e4m3fn, and NaN in e4m3fnuz."""


def fp8_product(
    codes_MK: Tensor, codes_NK: Tensor, scale_M1: Tensor, scale_N1: Tensor | None, bias_N: Tensor | None, *, fast: bool
) -> Tensor:
    """Return (codes_MK codes_NK^T) * scale_M1 * scale_N1^T + bias_N as bfloat16 [M, N].

    Args:
        codes_MK: bytes of e4m3fn numbers, int8. No zero has a sign.
        codes_NK: bytes of e4m3fn numbers, int8, contiguous.
        scale_M1: float32 scale per row.
        scale_N1: float32 scale per column, or None for 1.
        bias_N: bfloat16, or None.
        fast: whether Hopper may sum with fewer bits. It is for forward passes only, as in NVIDIA's Transformer Engine.
    """
    stored = torch.float8_e4m3fn
    if scale_N1 is None:
        scale_N1 = scale_M1.new_ones(len(codes_NK), 1)
    if fnuz(codes_MK.device):
        stored = torch.float8_e4m3fnuz
        codes_NK, scale_M1, scale_N1 = as_fnuz(codes_NK), 2 * scale_M1, 2 * scale_N1
    made: Tensor = torch._scaled_mm(
        codes_MK.view(stored),
        codes_NK.view(stored).t(),
        scale_a=padded(scale_M1),
        scale_b=padded(scale_N1).t(),
        bias=bias_N,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast and torch.version.hip is None,
    )
    return made


def int8_product(codes_MK: Tensor, codes_NK: Tensor) -> Tensor:
    """Return codes_MK codes_NK^T as int32 [M, N]. ``codes_NK`` is contiguous."""
    made: Tensor = torch._int_mm(codes_MK, codes_NK.t())
    return made


def require(name: str, device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Check that this device is to multiply in a format, "fp8" or "int8". The CPU multiplies in float32 instead.

    Raises:
        MachineError: "eight-bit-refused", the GPU is not used for such products, or hipBLASLt or Triton is missing.
    """
    if device.type != "cuda":
        return
    why = backend.refusal(device)
    if why is None and torch.version.hip:
        why = refusal_of(gfx_of(device), name) or (hipblaslt_is_off(environ) and HIPBLASLT_OFF) or None
    elif why is None:
        found, least = torch.cuda.get_device_capability(device), OF_NVIDIA["fp8" if name == "fp8" else "int8"]
        why = (
            None if found >= least else f"its compute capability is {found[0]}.{found[1]}, below {least[0]}.{least[1]}"
        )
    if why is not None:
        raise refused(name, why)


def multiplies_on(device: torch.device) -> bool:
    """Whether torch's library has the products for a device. The meta device represents a GPU."""
    return device.type in ("cuda", "meta")


def as_fnuz(codes: Tensor) -> Tensor:
    """Return the bytes of e4m3fnuz numbers that are half of these e4m3fn numbers, exactly.

    The exponent's bias is larger by 1, so the bytes are the same, except for the byte of -0. The caller doubles the
    scale.
    """
    return codes.masked_fill(codes == ZERO_OF_OTHER_SIGN, 0)


def padded(scale_M1: Tensor) -> Tensor:
    """Return the scales at the beginning of memory for a multiple of ``SCALES`` numbers."""
    count = len(scale_M1)
    if count % SCALES == 0 or scale_M1.untyped_storage().nbytes() // 4 - scale_M1.storage_offset() >= ceiling(count):
        return scale_M1
    return F.pad(scale_M1, (0, 0, 0, ceiling(count) - count))[:count]


def ceiling(count: int) -> int:
    """Return the next multiple of ``SCALES``."""
    return -(-count // SCALES) * SCALES


def fnuz(device: torch.device) -> bool:
    """Whether the GPU computes with e4m3fnuz in place of e4m3fn."""
    return bool(torch.version.hip) and has_fnuz(_known_gfx(device) if device.type == "cuda" else gfx_of(device))


_known_gfx = lru_cache(gfx_of)
