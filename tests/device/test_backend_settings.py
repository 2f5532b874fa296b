"""The planned settings are what torch then does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lora_rocm.device.backend_settings import apply, plain_attention, wake
from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.hardware.settings import Settings
from tests.device.fake_card import GPU, SETTINGS, FakeCard

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    enabled = torch.backends.cudnn.enabled
    yield
    apply(Settings(), CPU)
    torch.backends.cudnn.enabled = enabled


def fused() -> set[bool]:
    cuda = torch.backends.cuda
    return {cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()}


@pytest.mark.parametrize("miopen", [True, False])
def test_convolutions(miopen: bool) -> None:
    torch.backends.cudnn.benchmark = True
    apply(Settings(miopen=miopen), CPU)
    assert torch.backends.cudnn.enabled is miopen
    assert torch.backends.cudnn.benchmark is False and torch.backends.cudnn.allow_tf32 is False


@pytest.mark.parametrize(("attention", "enabled"), [("auto", True), ("math", False)])
def test_attention(attention: str, enabled: bool) -> None:
    apply(Settings(attention=attention), CPU)
    assert fused() == {enabled} and torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize(
    ("device", "hip", "enabled"), [("cuda", "7.2.53211", False), ("cuda", None, True), ("cpu", "7.2.53211", True)]
)
def test_the_vae_has_plain_attention_on_amd(
    device: str, hip: str | None, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    apply(Settings(), CPU)
    with plain_attention(torch.device(device)):
        assert fused() == {enabled} and torch.backends.cuda.math_sdp_enabled()
    assert fused() == {True}


def test_the_memory_limit_counts_what_others_hold_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(tmp_path, others=2 * GIB).install(monkeypatch)
    apply(Settings(), GPU)
    apply(SETTINGS, CPU)
    assert card.fractions == []
    apply(SETTINGS, GPU)
    assert SETTINGS.memory_limit_bytes is not None
    assert card.limit == SETTINGS.memory_limit_bytes - 2 * GIB


def test_a_worker_asks_the_driver_when_it_wakes_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, zeros = FakeCard(tmp_path, others=2 * GIB).install(monkeypatch), torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    apply(SETTINGS, GPU, wakes_later=True)
    assert card.limit == SETTINGS.memory_limit_bytes
    wake(GPU, SETTINGS)
    assert SETTINGS.memory_limit_bytes is not None and card.limit == SETTINGS.memory_limit_bytes - 2 * GIB
