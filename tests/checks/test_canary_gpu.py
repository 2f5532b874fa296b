"""The canary on a GPU: passes, costs little, and notices wrong kernels and weights there."""

from __future__ import annotations

import statistics
import sys
import time

import pytest
import torch
from torch import nn

from lora_rocm.checks.canary import SCALES, Canary
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from tests.device.broken import ATTENTION, CONVOLUTIONS, PRODUCTS, Broken, one_bit, one_nan, stale, tail_of_zeros, zeros

GPU = torch.device("cuda", 0)
LOOKS = 20
BASE_LAYERS, BASE_WIDTH = 100, 2048  # 800 MiB in 16 bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def base(dtype: torch.dtype, layers: int) -> nn.Module:
    with torch.device(GPU):
        net = nn.Sequential(*(nn.Linear(BASE_WIDTH, BASE_WIDTH, dtype=dtype) for _ in range(layers)))
    return net.to("cpu").requires_grad_(False)


def canary(dtype: torch.dtype, layers: int = 0) -> Canary:
    placement = Resident(DeviceTransfer(GPU, pin=True))
    placement.place(base(dtype, layers), "base")
    return Canary(GPU, dtype, 16, placement)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_sound_gpu_passes_and_the_time_is_told(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for layers in (0, BASE_LAYERS):
        look = canary(dtype, layers)
        assert [look.failure() for _ in SCALES] == [None] * len(SCALES)
        torch.cuda.synchronize()
        taken_ms = []
        for _ in range(LOOKS):
            started = time.perf_counter()
            assert look.failure() is None
            taken_ms.append((time.perf_counter() - started) * 1e3)
        size = sum(tensor.numel() * tensor.element_size() for tensor in look.placement.on_device().values())
        told.append(
            f"{statistics.median(taken_ms):.1f} ms with a base of {size / 2**20:.0f} MiB ({2 * layers} tensors)"
        )
    with capsys.disabled():
        sys.stdout.write(f"\ncanary {dtype}, {torch.cuda.get_device_name(GPU)}, median of {LOOKS}: {'; '.join(told)}\n")


@pytest.mark.parametrize("fault", [zeros, tail_of_zeros, one_bit, one_nan, stale])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", [PRODUCTS, CONVOLUTIONS, ATTENTION], ids=["products", "convolution", "attention"])
def test_wrong_kernels_are_noticed(kernels: set[str], dtype: torch.dtype, fault) -> None:  # type: ignore[no-untyped-def]
    look = canary(dtype)
    assert look.failure() is None
    with Broken(kernels, fault) as broken:
        found = look.failure()
    assert broken.hits and found is not None and found.code == "canary-kernel"
    assert look.failure() is None


def test_a_flipped_bit_in_device_memory_is_noticed() -> None:
    look = canary(torch.bfloat16, 2)
    assert look.failure() is None
    weight = look.placement.on_device()["base.1.weight"]
    weight.data.view(torch.int16)[-1, -1] ^= 1
    found = look.failure()
    assert found is not None and "base.1.weight" in found.where
