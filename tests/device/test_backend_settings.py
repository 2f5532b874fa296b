"""The planned settings are what torch then does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lora_rocm.device import backend_settings as module
from lora_rocm.device.backend_settings import apply, plain_attention
from lora_rocm.hardware.settings import Settings

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


def test_the_memory_limit_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(module, "limit", lambda *arguments: calls.append(arguments))
    apply(Settings(memory_limit_bytes=5), CPU)
    apply(Settings(), CPU)
    assert calls == [(CPU, 5), (CPU, None)]
