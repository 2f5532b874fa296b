"""Values of MXFP4 against the definition of the format, and against transformers' own conversion."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lora_rocm.kernels.mxfp4 import unpacked


def test_each_number_is_that_of_the_format() -> None:
    """Sign, exponent and mantissa by the rules of E2M1, the first value in the lower half of a byte."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    found = unpacked(blocks, torch.full((16,), 127, dtype=torch.uint8), torch.float32)

    def number(code: int) -> float:
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return math.copysign(size, -1 if code & 8 else 1)

    assert found.tolist() == [value for byte in range(256) for value in (number(byte & 15), number(byte >> 4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    """All codes, at all scales from the smallest; the largest two overflow."""
    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 84, 5, 16), generator=rng, dtype=torch.uint8)
    scales = torch.arange(3 * 84).clamp(max=252).to(torch.uint8).view(3, 84, 1).expand(3, 84, 5).contiguous()
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    found = unpacked(blocks, scales, dtype)
    assert found.dtype == dtype and found.shape == (3, 84, 160) and torch.equal(found, wanted)
