"""A frozen convolution: PyTorch's outputs and gradients, without its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lora_rocm.kernels.frozen_conv import FrozenConv2d

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"padding": 1},
    "stride": {"padding": 1, "stride": 2},
    "groups": {"padding": 1, "groups": 2, "dilation": 2},
    "no bias": {"bias": False},
}


def both(dtype: torch.dtype = torch.float32, **how: Any) -> tuple[nn.Conv2d, FrozenConv2d]:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, **how).to(dtype)
    frozen = FrozenConv2d(4, 6, 3, **how).to(dtype)
    frozen.load_state_dict(plain.state_dict())
    return plain.requires_grad_(False), frozen.requires_grad_(False)


def layout_of(tensor: Tensor) -> torch.memory_format:
    channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def passed(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """(output, gradient of the input, numbers kept in addition to weights)."""
    kept, weights = 0, {p.data_ptr() for p in conv.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * (tensor.data_ptr() not in weights)
        return tensor

    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = conv(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, dtype=y.dtype).to(y).contiguous(memory_format=layout_of(y)))
    assert x.grad is not None
    return y.detach(), x.grad, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_is_pytorchs_and_keeps_no_input(dtype: torch.dtype, kind: str, layout: torch.memory_format) -> None:
    plain, frozen = both(dtype, **KINDS[kind])
    x = torch.randn(2, 4, 9, 8).to(dtype).contiguous(memory_format=layout)
    (y, dx, kept), (wanted_y, wanted_dx, kept_plain) = passed(frozen, x), passed(plain, x)
    assert torch.equal(y, wanted_y)
    torch.testing.assert_close(dx, wanted_dx)
    assert dx.stride() == wanted_dx.stride()
    assert (kept, kept_plain) == (0, x.numel())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 3), (2, 3), (1, 1)], ids=["plain", "stride", "one pixel"])
def test_on_a_gpu_it_is_the_same_call_in_the_same_layout(dtype: torch.dtype, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    stride, kernel = size
    how = {"stride": stride, "padding": kernel // 2, "device": "cuda", "dtype": dtype}
    plain, frozen = nn.Conv2d(64, 128, kernel, **how), FrozenConv2d(64, 128, kernel, **how)
    frozen.load_state_dict(plain.state_dict())
    for conv in (plain, frozen):
        conv.requires_grad_(False).weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    x = torch.randn(2, 64, 32, 32, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    (y, dx, kept), (wanted_y, wanted_dx, _) = passed(frozen, x), passed(plain, x)
    assert kept == 0 and torch.equal(y, wanted_y) and dx.stride() == wanted_dx.stride() == x.stride()
    torch.testing.assert_close(dx, wanted_dx)


def test_what_is_trained_goes_pytorchs_way() -> None:
    _, conv = both(padding=1)
    conv.weight.requires_grad_(True)
    conv(torch.randn(1, 4, 8, 8)).sum().backward()
    assert conv.weight.grad is not None


def test_under_autocast_it_goes_pytorchs_way() -> None:
    _, conv = both(torch.bfloat16, padding=1)
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad is not None


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.Conv2d(2, 2, 3, padding=1), True),
        (nn.Conv2d(2, 2, 1), True),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), False),
        (nn.Conv2d(2, 2, 3, padding="same"), False),
    ],
)
def test_which_layers_it_takes(layer: nn.Conv2d, fits: bool) -> None:
    assert FrozenConv2d.fits(layer) is fits
