"""The number format: the recipe's, else the plan's, else what the GPU is known to compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_rocm.device.precision import choose_device, compute_dtype, describe
from lora_rocm.errors import MachineError
from lora_rocm.hardware.settings import Settings
from tests.wording import saying

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def radeon(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    properties = SimpleNamespace(name="Radeon", gcnArchName=request.param)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(("asked", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_recipe_wins(asked: str, dtype: torch.dtype) -> None:
    for device in (CPU, GPU):
        assert compute_dtype(asked, device, Settings(precision="no")) is dtype


def test_the_cpu_computes_float32_whatever_the_plan_says_about_the_gpu() -> None:
    assert compute_dtype("auto", CPU, Settings(precision="fp16")) is torch.float32


@pytest.mark.parametrize(
    ("planned", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_auto_is_what_was_planned(planned: str, dtype: torch.dtype) -> None:
    assert compute_dtype("auto", GPU, Settings(precision=planned)) is dtype
    without = torch.bfloat16 if dtype is torch.float16 else dtype
    assert compute_dtype("auto", GPU, Settings(precision=planned), takes_fp16=False) is without


@pytest.mark.parametrize(
    ("radeon", "dtype"),
    [
        ("gfx1201", torch.bfloat16),
        ("gfx942:sramecc+:xnack-", torch.bfloat16),
        ("gfx1030", torch.float16),
        ("gfx1010:xnack-", torch.float16),
        ("gfx906:sramecc-", torch.float16),
        ("gfx9999", torch.float16),  # no table knows it
    ],
    indirect=["radeon"],
)
def test_without_a_plan_the_table_of_architectures_decides(radeon: None, dtype: torch.dtype) -> None:
    assert compute_dtype("auto", GPU, Settings()) is dtype


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_nvidia(capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype("auto", GPU, Settings()) is dtype


def test_choosing_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(MachineError, match="sees none"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto") == choose_device("gpu") == GPU and choose_device("cpu") == CPU


def test_an_expected_gpu_is_not_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, check=saying("device/does-not-see-it")):
        choose_device("auto", Settings(expect_gpu=True))
    assert choose_device("cpu", Settings(expect_gpu=True)).type == "cpu"
    assert choose_device("auto", Settings()).type == "cpu"


@pytest.mark.parametrize("radeon", ["gfx1100"], indirect=True)
def test_a_device_in_words(radeon: None) -> None:
    assert describe(CPU) == "CPU" and describe(GPU) == "Radeon (gfx1100)"
