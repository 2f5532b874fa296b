"""The fused LoRA layers against the plain formula, and their gradients against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.kernels.fused_lora import lora_linear, lora_projections

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float64, leaf: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(leaf)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_finite_differences(scale: float, bias: bool) -> None:
    weight, b = normal(4, 5, leaf=False), normal(4, leaf=False) if bias else None
    inputs = (normal(2, 3, 5), normal(2, 5), normal(4, 2))
    assert torch.autograd.gradcheck(lambda x, down, up: lora_linear(x, weight, b, down, up, scale), inputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_merged_gradients_are_those_of_finite_differences(scale: float, bias: bool) -> None:
    weight, b = normal(7, 5, leaf=False), normal(7, leaf=False) if bias else None
    inputs = (normal(2, 3, 5), normal(2, 5), normal(3, 5), normal(4, 2), normal(3, 3))
    assert torch.autograd.gradcheck(lambda x, *w: lora_projections(x, weight, w[:2], w[2:], scale, b), inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 2, 3, 6)])
def test_is_the_plain_formula_in_every_format(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(4, 6, dtype=dtype, leaf=False)
    down, up = normal(2, 6, dtype=dtype), normal(4, 2, dtype=dtype)
    output = lora_linear(x, weight, None, down, up, 0.5)
    output.square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, down, up)]
    plain = exact[0] @ weight.double().t() + 0.5 * exact[0] @ exact[1].t() @ exact[2].t()
    plain.square().sum().backward()
    assert output.shape == (*shape[:-1], 4) and output.dtype == dtype
    for found, wanted in [(output, plain), *((a.grad, b.grad) for a, b in zip((x, down, up), exact, strict=True))]:
        assert found is not None and wanted is not None and found.dtype == dtype
        assert (found.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


def test_merged_is_each_projection_alone() -> None:
    x, weight, bias = normal(2, 3, 5), normal(9, 5, leaf=False), normal(9, leaf=False)
    down, up = [normal(2, 5) for _ in range(3)], [normal(3, 2) for _ in range(3)]
    merged = lora_projections(x, weight, down, up, 0.5, bias_O=bias)
    for output, rows, part, a, b in zip(merged, weight.split(3), bias.split(3), down, up, strict=True):
        torch.testing.assert_close(output, lora_linear(x, rows, part, a, b, 0.5))
        assert output.untyped_storage().data_ptr() == merged[0].untyped_storage().data_ptr()


def test_what_needs_no_gradient_gets_none_and_costs_none() -> None:
    products: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.extend([str(func)] if "mm" in str(func) else [])
            return func(*args, **(kwargs or {}))

    weight, counts = normal(4, 5, leaf=False), []
    for leaf in (False, True):
        x, down, up = normal(3, 5, leaf=leaf), normal(2, 5), normal(4, 2)
        loss = lora_linear(x, weight, None, down, up, 1.0).sum()
        products.clear()
        with Count():
            loss.backward()
        counts.append(len(products))
        assert (x.grad is not None) == leaf and weight.grad is None
    assert counts == [3, 5]  # dy B, dA, dB; with the input's gradient two more
