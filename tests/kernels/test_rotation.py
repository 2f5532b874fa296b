"""The rotation of int8 layers: its matrix, the exact product, the weights that others read, and smaller errors."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.kernels.eight_bit_library import MIN_ROWS
from lora_rocm.kernels.quantised import ScaledRows, quantised
from lora_rocm.kernels.rotation import GROUPS, group_of, rotated
from lora_rocm.kernels.weight_format import PackedLinear, dense_weight

CONVROT = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
"""ConvRot's matrix of 4 numbers; its Kronecker powers rotate the groups of ConvRot's files (arXiv 2512.03673)."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def off(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def packed(inputs: int, rotates: bool = True) -> tuple[nn.Linear, PackedLinear]:
    layer = nn.Linear(inputs, 48).requires_grad_(False)
    return layer, quantised("int8", "", "int8", rotates=rotates).packed(layer)


@pytest.mark.parametrize("group", GROUPS)
def test_the_matrix_is_its_own_inverse_and_keeps_equal_numbers(group: int) -> None:
    matrix = rotated(torch.eye(group), group)
    assert torch.equal(matrix @ matrix, torch.eye(group)) and torch.equal(matrix, matrix.t())
    assert matrix.abs().eq(group**-0.5).all() and rotated(torch.full((2, group), 3.0), group).eq(3).all()
    power = reduce(torch.kron, [CONVROT] * {16: 2, 64: 3, 256: 4}[group])
    assert torch.equal(matrix.flip(0), power), "ConvRot's numbers of a group are in reverse order"


def test_groups_are_rotated_by_themselves() -> None:
    x = torch.randn(3, 5, 192)
    parts = [rotated(part, 64) for part in x.split(64, dim=-1)]
    assert torch.equal(rotated(x, 64), torch.cat(parts, dim=-1)) and torch.equal(rotated(x, 0), x)
    assert [group_of(inputs) for inputs in (3072, 640, 48, 40)] == [256, 64, 16, 0]


@pytest.mark.parametrize("inputs", [512, 320, 48])
def test_others_read_the_weight_that_was_packed(inputs: int) -> None:
    """Export, merging and checks of the base: the rotation is undone, within the rounding of int8."""
    layer, found = packed(inputs)
    assert off(dense_weight(found), layer.weight) < 0.012
    assert off(found.dense(torch.bfloat16, "triton"), layer.weight) < 0.012
    stored = found.weight * found.get_buffer("weight_scale")
    assert off(stored, layer.weight) > 0.5, "the control: the codes are of the rotated weight"
    assert off(rotated(stored, group_of(inputs)), dense_weight(found)) < 1e-6


@pytest.mark.parametrize("inputs", [512, 320, 48])
@pytest.mark.parametrize("rows", [MIN_ROWS, MIN_ROWS - 1])
def test_products_that_need_no_rounding_are_those_of_the_dense_weight(inputs: int, rows: int) -> None:
    """In both directions, also where few rows are multiplied by the stored numbers."""
    _, layer = packed(inputs)
    codes = [torch.randint(-127, 128, (rows, count)).float() for count in (inputs, 48)]
    for drawn in codes:
        drawn[:, 0] = 127
    x = rotated(codes[0], group_of(inputs)).requires_grad_()
    dy = codes[1] / layer.get_buffer("weight_scale").view(-1)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    weight_OI = dense_weight(layer)
    assert off(y, x @ weight_OI.t() + layer.bias) < 1e-6 and off(dx, dy @ weight_OI) < 1e-6


def test_errors_with_large_inputs_are_a_quarter() -> None:
    x = torch.randn(64, 512)
    x[:, ::100] *= 20
    found = []
    for rotates in (True, False):
        _, layer = packed(512, rotates=rotates)
        leaf = x.clone().requires_grad_()
        found.append(off(layer(leaf), x @ dense_weight(layer).t() + layer.bias))
    assert found[0] < 0.012 < 4 * found[0] < found[1]


def test_a_large_weight_makes_its_row_no_less_exact() -> None:
    layer = nn.Linear(512, 48).requires_grad_(False)
    layer.weight[:, ::100] *= 20
    found, plain = (
        off(dense_weight(quantised("int8", "", "int8", rotates=how).packed(layer)), layer.weight)
        for how in (True, False)
    )
    assert found < 0.01 < 4 * found < plain


def test_only_products_in_int8_are_rotated() -> None:
    for name, compute, sizes, group in (
        ("int8", "int8", (512, 48), 256),
        ("int8", "bf16", (512, 48), 0),
        ("fp8", "fp8", (512, 48), 0),
        ("int8", "int8", (512, 40), 0),
    ):
        form = quantised(name, "", compute)
        assert isinstance(form, ScaledRows) and form.group(nn.Linear(*sizes)) == group
