"""LoRA's A as rows of merged weights: the plain product's numbers, rows that are always the leaves', and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lora_rocm.device.transfer import whole_fingerprints
from lora_rocm.kernels import merged, stacked_rows
from lora_rocm.kernels.base_product import unpacked_once
from lora_rocm.kernels.fused_lora import lora_projections
from lora_rocm.kernels.gated import gated
from lora_rocm.kernels.lora_layer import LoraLinear, with_lean_layers
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.stacked_rows import reserved_bytes, rows_stacked, stacked_projections

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WIDE, NARROW = (24, 24), (24, 6, 6)
"""Widths of the outputs for 16 inputs: no gradient is copied, or the last two are."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float64, leaf: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(leaf)


class Case:
    """Random projections of ``inputs`` numbers; their ranks differ."""

    def __init__(self, widths: Sequence[int], dtype: torch.dtype, ranks: Sequence[int] = (3, 2, 4)) -> None:
        self.outputs, self.inputs = sum(widths), 16
        self.weight = normal(self.outputs, self.inputs, dtype=dtype, leaf=False)
        self.bias = normal(self.outputs, dtype=dtype, leaf=False)
        self.a = [normal(rank, self.inputs, dtype=dtype) for rank, _ in zip(ranks, widths, strict=False)]
        self.b = [normal(width, rank, dtype=dtype) for rank, width in zip(ranks, widths, strict=False)]
        self.x = normal(2, 5, self.inputs, dtype=dtype)

    def with_rows(self, fill: float = 0.0) -> Tensor:
        rows = -(-(self.outputs + sum(map(len, self.a))) // 64) * 64 - self.outputs
        return torch.cat([self.weight, self.weight.new_full((rows, self.inputs), fill)])

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.a, *self.b]


def plain(case: Case) -> Sequence[Tensor]:
    return lora_projections(case.x, case.weight, case.a, case.b, 0.5, case.bias)


def stacked(case: Case, weight: Tensor | None = None) -> Sequence[Tensor]:
    weight = case.with_rows() if weight is None else weight
    return stacked_projections(case.x, weight, case.a, case.b, 0.5, case.bias)


def of_gate(outputs: Sequence[Tensor]) -> Tensor:
    """The gradients are then written over the outputs."""
    value, gate = outputs
    return gated("silu", "eager", value, gate)


def squared(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.sin(output) for output in outputs], dim=-1)


def results(case: Case, project: Callable[[Case], Sequence[Tensor]], use: Callable[..., Tensor]) -> list[Tensor]:
    output = use(project(case))
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output, *torch.autograd.grad((output * weight).sum(), case.leaves)]


def require_same(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        exact = other.detach().double()
        error = float((one.detach().double() - exact).norm() / exact.norm())
        assert error <= tolerance, (number, error)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("widths", "use"), [(WIDE, squared), (WIDE, of_gate), (NARROW, squared)])
def test_it_is_the_plain_form(widths: tuple[int, ...], use: Callable[..., Tensor], dtype: torch.dtype) -> None:
    case = Case(widths, dtype)
    require_same(results(case, stacked, use), results(case, plain, use), TOLERANCE[dtype])


@pytest.mark.parametrize("widths", [WIDE, NARROW])
@pytest.mark.parametrize("ranks", [(3, 2, 4), (4, 4, 8)])
def test_gradients_are_those_of_finite_differences(widths: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    case = Case(widths, torch.float64, ranks)
    count, weight = len(widths), case.with_rows()

    def run(x: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        return stacked_projections(x, weight, w[:count], w[count:], 0.5, case.bias)

    assert torch.autograd.gradcheck(run, case.leaves)


def test_a_weight_that_is_made_for_each_pass() -> None:
    case, calls = Case(NARROW, torch.float64), list[int]()

    def dense() -> Tensor:
        calls.append(1)
        return case.with_rows()

    def made(case: Case) -> Sequence[Tensor]:
        return stacked_projections(case.x, None, case.a, case.b, 0.5, case.bias, dense)

    wanted = results(case, plain, squared)
    require_same(results(case, made, squared), wanted, 1e-12)
    assert len(calls) == 2, "forward and backward"
    with unpacked_once():
        require_same(results(case, made, squared), wanted, 1e-12)
    assert len(calls) == 3, "the backward pass uses the same"


def test_gradients_in_place_take_one_product_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    products = list[str]()

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            name = str(func)
            products.extend([name] if "mm" in name or "cat" in name else [])
            return func(*args, **(kwargs or {}))  # type: ignore[operator, misc]

    def counted(project: Callable[[Case], Sequence[Tensor]]) -> list[int]:
        case, found = Case(WIDE, torch.float32), list[int]()
        weight = case.with_rows()
        with Count():
            output = of_gate(stacked(case, weight) if project is stacked else project(case))
            found.append(len(products))
            output.sum().backward()
            found.append(len(products) - found[0])
        products.clear()
        return found

    # Two dh, dA and two dB, and x's gradient: three products, or one
    assert counted(plain)[1] == 5 + 3 and counted(stacked)[1] == 5 + 1
    # One cat of A, two of B's products, and base and A: two products, or one
    assert counted(plain)[0] == 3 + 2 and counted(stacked)[0] == 3 + 1
    monkeypatch.setattr(stacked_rows, "_is_in_place", lambda *_: False)
    assert counted(stacked)[1] == 5 + 3, "the control"


def test_no_row_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(NARROW, torch.float64)
    weight = case.with_rows(fill=7.0)
    for _ in range(2):
        require_same(results(case, partial(stacked, weight=weight), squared), results(case, plain, squared), 1e-12)
        torch.testing.assert_close(weight[case.outputs :][:9], torch.cat([*case.a]))
        with torch.no_grad():
            for a in case.a:
                a.mul_(-1.5)
    # Control: rows that nobody refreshes
    monkeypatch.setattr(stacked_rows, "_with_rows", lambda weight, *_: weight)
    with pytest.raises(AssertionError):
        require_same(results(case, partial(stacked, weight=weight), squared), results(case, plain, squared), 1e-1)


def test_two_passes_before_a_backward_pass() -> None:
    """The second writes the rows that the first has saved."""
    case = Case(NARROW, torch.float64)
    weight = case.with_rows()
    outputs = [squared(stacked(case, weight)).sum() for _ in range(2)]
    torch.stack(outputs).sum().backward()
    found = [leaf.grad for leaf in case.leaves if leaf.grad is not None]
    wanted = torch.autograd.grad(2 * squared(plain(case)).sum(), case.leaves)
    require_same(found, wanted, 1e-12)


def test_the_weights_are_not_written() -> None:
    case = Case(WIDE, torch.float32)
    weight = case.with_rows()
    results(case, partial(stacked, weight=weight), of_gate)
    torch.testing.assert_close(weight[: case.outputs], case.weight, rtol=0, atol=0)


def test_an_input_without_gradient_gets_none() -> None:
    case = Case(NARROW, torch.float64)
    case.x.requires_grad_(False)
    squared(stacked(case)).sum().backward()
    found = [leaf.grad for leaf in [*case.a, *case.b] if leaf.grad is not None]
    require_same(found, torch.autograd.grad(squared(plain(case)).sum(), [*case.a, *case.b]), 1e-12)
    assert case.x.grad is None


# Layers


WIDTHS = {"q": 64, "k": 32, "v": 32}


class Layers(nn.Module):
    """Three linear layers with the same input and a LoRA each."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(64, width, bias) for name, width in WIDTHS.items()})
        self.merged: MergedLinears | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.merged is not None
        return torch.cat(self.merged(list(self.layers.values()), x), dim=-1)


def layers(bias: bool, packed: bool, stacked: bool) -> Layers:
    torch.manual_seed(1)
    model = Layers(bias)
    config = LoraConfig(r=6, lora_alpha=3, target_modules=["q", "k", "v"], init_lora_weights=False)
    inject_adapter_in_model(with_lean_layers(config), model)
    for layer in model.layers.values():
        assert isinstance(layer, LoraLinear)
        if packed:
            layer.base_layer = quantised("int8", "").packed(layer.base_layer)
    with rows_stacked(stacked):
        model.merged = MergedLinears.of(*model.layers.values())
    return model


def pass_of(model: Layers) -> list[Tensor]:
    torch.manual_seed(2)
    x = torch.randn(2, 5, 64, requires_grad=True)
    output = model(x)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [output, *torch.autograd.grad(output.sin().sum(), [x, *trained])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", ["joined", "packed", "moved"])
def test_layers_with_all_kinds_of_weights(weights: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked_calls, original = list[int](), merged.stacked_projections

    def counted(*given: Any) -> tuple[Tensor, ...]:
        stacked_calls.append(1)
        return original(*given)

    monkeypatch.setattr(merged, "stacked_projections", counted)
    found = []
    for form in (False, True):
        model = layers(bias, weights == "packed", form)
        if weights == "moved":  # as offloading does
            for layer in model.layers.values():
                base: Any = layer.get_base_layer()  # type: ignore[operator]
                base.weight.data = base.weight.data.clone()
        found.append(pass_of(model))
        assert bool(stacked_calls) is form
    require_same(found[1], found[0], 1e-5)


def test_frozen_bytes_are_those_of_the_weights_alone() -> None:
    """A changes; the fingerprinted bytes do not contain it."""
    model = layers(True, packed=False, stacked=True)
    bases: list[Any] = [layer.get_base_layer() for layer in model.layers.values()]  # type: ignore[operator]
    before = whole_fingerprints([base.weight.data for base in bases], 0).tolist()
    pass_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.add_(1.0)
    pass_of(model)
    assert whole_fingerprints([base.weight.data for base in bases], 0).tolist() == before
    assert sum(reserved_bytes(base, torch.float32) for base in bases) == 64 * 64 * 4
    assert model.merged is not None and model.merged.weight_OI is not None
    model.merged.weight_OI[0, 0] += 1  # the control: a weight of the base
    assert whole_fingerprints([base.weight.data for base in bases], 0).tolist() != before
