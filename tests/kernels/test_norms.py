"""The eager implementation of norms of rows with residual branches: compared with the formula, and the memory
it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_norm, residual_stream, rms_normal


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad(output, inputs, weights)]


def same(found: Callable[..., Tensor], wanted: Callable[..., Tensor], *inputs: Tensor) -> bool:
    pairs = zip(gradients(found(*inputs), inputs), gradients(wanted(*inputs), inputs), strict=True)
    return all(torch.allclose(one, other) for one, other in pairs)


def test_a_gated_branch_is_normalised_and_added() -> None:
    x, y, gate = numbers(2, 3, 8), numbers(2, 3, 8), numbers(2, 8)

    def wanted(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return x + gate[:, None] * rms(y, 1e-5)

    assert same(lambda x, y, gate: add_branch(x, Branch(y, gate, 1e-5), "eager"), wanted, x, y, gate)
    assert not same(lambda x, y, gate: add_branch(x, Branch(y, gate), "eager"), wanted, x, y, gate)


def gated_sum(form: Implementation) -> Callable[..., Tensor]:
    return lambda x, y, gate: add_branch(x, Branch(y, gate), form)


def plain_gated_sum(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return torch.addcmul(x, y, gate[:, None])


@pytest.mark.parametrize("trained", [False, True])
def test_a_gated_sum_equals_the_plain_one_to_the_bit(trained: bool) -> None:
    x, y, gate = numbers(2, 3, 8), numbers(2, 3, 8), numbers(2, 8).detach().requires_grad_(trained)
    inputs = (x, y, gate) if trained else (x, y)
    pairs = zip(*(gradients(s(x, y, gate), inputs) for s in (gated_sum("eager"), plain_gated_sum)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def products_of_backward(ended: Callable[..., Tensor], device: str = "cpu") -> int:
    """Matrix products of a recomputed block's backward pass: a trained product, a frozen one, a gated sum."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    trained, frozen, gate = (torch.randn(8, 8, device=device) for _ in range(3))
    trained.requires_grad_()

    def block(x: Tensor) -> Tensor:
        return ended(x[:, None], ((x @ trained) @ frozen)[:, None], gate[:4])

    output = checkpoint(block, x, use_reentrant=False)
    with _Products() as counted:
        output.sum().backward()
    return counted.count


def test_recomputation_stops_before_the_product_of_a_gated_sum() -> None:
    """Three are of the backward pass itself; the plain sum keeps its gate, and is reached (negative control)."""
    assert products_of_backward(gated_sum("eager")) == 4
    assert products_of_backward(plain_gated_sum) == 5


@pytest.mark.gpu
def test_and_in_the_form_of_triton() -> None:
    assert products_of_backward(gated_sum("triton"), "cuda") == 4


@pytest.mark.parametrize("centred", [False, True])
def test_a_sum_is_normalised_and_modulated_for_each_sample(centred: bool) -> None:
    x, y, weight, bias = numbers(2, 3, 8), numbers(2, 3, 8), numbers(2, 8), numbers(2, 8)

    def wanted(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total = x + y
        normal = rms(total - total.mean(-1, keepdim=True) if centred else total, 1e-5)
        return total + normal * weight[:, None] + bias[:, None]

    def found(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total, normal = add_norm(x, Branch(y), RowNorm(weight, bias, 1e-5, centred), "eager")
        return total + normal

    assert same(found, wanted, x, y, weight, bias)


def test_a_float32_stream_takes_float16_branches_and_gives_float16_normals() -> None:
    """The sum is exact beyond the range of float16, where the same in float16 is infinite (the control)."""
    x, y, gate = (torch.full(shape, 3e4, dtype=torch.float16) for shape in ((1, 2, 4), (1, 2, 4), (1, 4)))
    gate.fill_(8)
    y[..., 0] = 1
    norm = RowNorm(torch.ones_like(gate), torch.zeros_like(gate), 1e-6, centred=True)
    stream = residual_stream(x).requires_grad_()
    y.requires_grad_()
    total, normal = add_norm(stream, Branch(y, gate), norm, "eager")
    assert total.dtype == torch.float32 and normal.dtype == torch.float16
    assert torch.equal(total, x.float() + 8 * y.float()) and total.max() > 2e5
    torch.testing.assert_close(normal.float(), rms(total - total.mean(-1, keepdim=True), 1e-6), rtol=1e-3, atol=0)
    (total.sum() + normal.sum()).backward()
    assert stream.grad is not None and stream.grad.dtype == torch.float32
    assert y.grad is not None and y.grad.dtype == torch.float16
    assert not add_norm(x, Branch(y, gate), norm, "eager")[0].isfinite().all()
    assert residual_stream(x.bfloat16()).dtype == torch.bfloat16


def test_an_rms_norm_keeps_only_its_input() -> None:
    def kept(function: Callable[[Tensor], Tensor]) -> int:
        sizes: list[int] = []
        with saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            function(torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True))
        return sum(sizes)

    assert kept(lambda x: rms_normal(x, 1e-5)) == 4 * 16 * 2
    assert kept(lambda x: torch.nn.functional.rms_norm(x, (16,), eps=1e-5)) > 4 * 16 * 2


def test_the_result_has_the_dtype_that_is_asked_for_and_the_weight_is_not_rounded_to_it() -> None:
    """As 1 + weight of Gemma in float32, for a stream in bfloat16."""
    x, y, weight = (numbers(3, 64).detach().bfloat16() for _ in range(3))
    plus_one = 1 + weight[0].float()
    total, found = add_norm(x, Branch(y, plus_one, 1e-6), RowNorm(plus_one, None, 1e-6, dtype=torch.bfloat16), "eager")
    assert (total.dtype, found.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(total.float(), x.float() + rms(y.float(), 1e-6) * plus_one, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.float(), rms(total.float(), 1e-6) * plus_one, rtol=2e-2, atol=2e-2)
    wide = add_norm(x.float(), None, RowNorm(plus_one, None, 1e-6), "eager")[1]
    torch.testing.assert_close(wide, rms(x.float(), 1e-6) * plus_one)
