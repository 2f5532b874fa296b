"""The eager implementation of gated activations: compared with diffusers' and finite differences, and the memory it
keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers.models.activations import GEGLU
from torch.autograd.graph import saved_tensors_hooks

from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.gated import Activation, activated, gated, geglu_of


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_gradients_are_those_of_finite_differences() -> None:
    weight, bias = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: geglu_of(t, weight, bias), (x,))
    assert torch.autograd.gradcheck(lambda t: geglu_of(t, weight, None), (x,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_is_that_of_diffusers(dtype: torch.dtype, tolerance: float) -> None:
    plain = GEGLU(6, 10).requires_grad_(False)
    x = torch.randn(2, 3, 6, requires_grad=True)
    wanted = plain(x)
    wanted.square().sum().backward()
    proj = GEGLU(6, 10).requires_grad_(False).to(dtype).proj
    proj.load_state_dict(plain.proj.state_dict())
    for way in (lambda t: gated("gelu", "eager", proj(t)), lambda t: geglu_of(t, proj.weight, proj.bias)):
        y = x.detach().to(dtype).requires_grad_()
        output = way(y)
        output.square().sum().backward()
        assert output.dtype == dtype and (output - wanted).norm() <= tolerance * wanted.norm()
        assert y.grad is not None and x.grad is not None
        assert (y.grad - x.grad).norm() <= tolerance * x.grad.norm()


def plain(ag: torch.Tensor) -> torch.Tensor:
    a, g = ag.chunk(2, dim=-1)
    return a * torch.nn.functional.gelu(g)


def test_gradients_are_those_of_autograd() -> None:
    ag, dy = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(plain(ag), ag, dy)
    output = gated("gelu", "eager", ag.clone())
    (found,) = torch.autograd.grad(output, ag, dy)  # finite differences go back more than once
    torch.testing.assert_close(found, wanted)


def test_keeps_only_the_projection() -> None:
    def kept(function: object) -> int:
        sizes = []
        with saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            function(torch.randn(4, 20, requires_grad=True))  # type: ignore[operator]
        return sum(sizes)

    assert kept(lambda ag: gated("gelu", "eager", ag)) == 4 * 20
    assert kept(plain) > 4 * 20


def test_the_gradient_takes_the_place_of_the_projection() -> None:
    ag = torch.randn(4, 20, requires_grad=True)
    projected = ag.clone()
    projected.retain_grad()
    gated("gelu", "eager", projected).sum().backward()
    assert ag.grad is not None and torch.equal(projected.detach(), ag.grad)


def test_the_gradients_of_separate_halves_are_those_of_autograd() -> None:
    a, g, dy = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for activation, function in ACTIVATIONS.items():
        wanted = torch.autograd.grad(a * function(g), (a, g), dy)
        found = torch.autograd.grad(gated(activation, "eager", a.clone(), g.clone()), (a, g), dy)
        torch.testing.assert_close(found, wanted)


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu-tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "silu"])
def test_an_ungated_activation_has_autograds_gradients_in_the_place_of_its_input(activation: Activation) -> None:
    g, dy = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    (wanted,) = torch.autograd.grad(ACTIVATIONS[activation](g), g, dy)
    projected = g.clone()
    output = activated(activation, "eager", projected)
    torch.testing.assert_close(output, ACTIVATIONS[activation](g))
    (found,) = torch.autograd.grad(output, g, dy)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(projected, wanted)


def test_with_kernels_an_ungated_activation_keeps_bytes_in_bfloat16() -> None:
    def kept_bytes(form: Implementation, dtype: torch.dtype) -> int:
        sizes = []
        with saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            output = activated("gelu", form, torch.empty(4, 20, dtype=dtype, device="meta", requires_grad=True).clone())
        output.sum().backward()
        return sum(sizes)

    assert [kept_bytes(form, torch.bfloat16) for form in FORMS] == [160, 80]
    assert [kept_bytes(form, torch.float16) for form in FORMS] == [160, 160]


FORMS: tuple[Implementation, ...] = ("eager", "triton")
