"""Products in eight bits: codes, scales, errors, gradients, joined projections, and the formats of GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_check import FINGERPRINTS, IN_EIGHT_BITS, first_wrong
from lora_rocm.errors import MachineError
from lora_rocm.hardware.eight_bit import TARGETS, has_fnuz, refusal_of
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.kernels import backend, eight_bit, eight_bit_library
from lora_rocm.kernels.eight_bit import FP8, INT8, EightBitCode, scaled_rows
from lora_rocm.kernels.eight_bit_library import MIN_ROWS, as_fnuz, padded, require
from lora_rocm.kernels.lora_layer import LoraLinear
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import PackedLinear, dense_weight
from tests.event_lines import hearing

GPU = torch.device("cuda")
ERRORS = {"int8": 0.012, "fp8": 0.04}
"""Largest relative error of a product with normally distributed numbers, by rounding one of its sides."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def packed(name: str, outputs: int = 48, inputs: int = 64, compute: str | None = None, bias: bool = True) -> Any:
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return quantised(name, "", compute or name).packed(layer)


def adapted(base: nn.Module) -> Any:
    layer = LoraLinear(base, "default", LoraConfig(r=4, lora_alpha=2), r=4, lora_alpha=2)
    nn.init.normal_(layer.lora_B["default"].weight)
    return layer


def off(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("code", [INT8, FP8], ids=lambda code: code.name)
def test_rows_are_codes_times_a_scale(code: EightBitCode) -> None:
    x_MN = torch.randn(20, 64) * torch.logspace(-25, 25, 20)[:, None]
    x_MN[3] = 0
    given = x_MN.clone()
    codes_MN, scale_M1 = scaled_rows(x_MN, code, None, 0, "eager")
    numbers_MN = codes_MN.view(code.stored).float()
    assert torch.equal(x_MN, given) and codes_MN.dtype is torch.int8 and scale_M1.shape == (20, 1)
    assert torch.equal(numbers_MN.abs().amax(1), torch.where(x_MN.any(1), code.largest, 0.0))
    for found, wanted in zip((numbers_MN * scale_M1)[x_MN.any(1)], x_MN[x_MN.any(1)], strict=True):
        assert off(found, wanted) < ERRORS[code.name]


@pytest.mark.parametrize("code", [INT8, FP8], ids=lambda code: code.name)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_visible(code: EightBitCode, fault: float) -> None:
    layer, x = packed(code.name), torch.randn(20, 64)
    assert layer(x).isfinite().all(), "the control"
    x[7, 3] = fault
    assert not layer(x)[7].isfinite().any() and layer(x)[:7].isfinite().all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_off_by_the_rounding_of_inputs(name: str, dtype: torch.dtype) -> None:
    layer = packed(name)
    x, dy = torch.randn(3, 40, 64, dtype=dtype, requires_grad=True), torch.randn(3, 40, 48, dtype=dtype)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    weight_OI = dense_weight(layer).double()
    assert y.dtype == dx.dtype == dtype and y.shape == (3, 40, 48)
    errors = off(y, x.double() @ weight_OI.T + layer.bias.double()), off(dx, dy.double() @ weight_OI)
    assert all(ERRORS[name] / 4 < error < ERRORS[name] for error in errors)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_few_rows_and_odd_sizes_are_multiplied_by_the_dense_weight(name: str) -> None:
    x = torch.randn(40, 64)
    for layer, rows, exact in (
        (packed(name), MIN_ROWS, False),
        (packed(name), MIN_ROWS - 1, True),
        (packed(name, outputs=40), 40, True),
        (packed(name, compute="bf16"), 40, True),
    ):
        leaf = x[:rows].clone().requires_grad_()
        y = layer(leaf)
        y.sum().backward()
        assert leaf.grad is not None
        dense = dense_weight(layer)
        for found, wanted in ((y, leaf @ dense.T + layer.bias), (leaf.grad, torch.ones_like(y) @ dense)):
            assert (off(found, wanted) < 1e-5) == exact


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_joined_projections_are_those_of_each_layer(name: str) -> None:
    layers = [adapted(packed(name, outputs)) for outputs in (48, 64, 32)]
    merged = MergedLinears.of(*layers)
    assert merged is not None
    found: list[list[Tensor]] = []
    for together in (True, False):
        x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = merged(layers, x) if together else [layer(x) for layer in layers]
        leaves = [x, *(pair.weight for layer in layers for pair in (layer.lora_A["default"], layer.lora_B["default"]))]
        gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves)
        found.append([*outputs, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_of_the_lora_are_not_rounded() -> None:
    """A's and B's own products get the exact input, and the exact gradient of the output."""
    layer = adapted(packed("fp8"))
    x, dy = torch.randn(40, 64), torch.randn(40, 48)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    da, db = torch.autograd.grad(layer(x), (a, b), dy)
    torch.testing.assert_close(da, 0.5 * b.T @ dy.T @ x)
    torch.testing.assert_close(db, 0.5 * dy.T @ (x @ a.T))


def test_nothing_is_kept_or_unpacked_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[PackedLinear] = []
    dense = PackedLinear.dense

    def watched(self: PackedLinear, *how: Any) -> Tensor:
        unpacked.append(self)
        return dense(self, *how)

    monkeypatch.setattr(PackedLinear, "dense", watched)
    for compute, count in (("int8", 0), ("bf16", 2)):
        layer, saved = packed("int8", compute=compute), list[Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):  # type: ignore[arg-type]
            y = layer(torch.randn(40, 64, requires_grad=True))
        y.sum().backward()
        assert len(unpacked) == count and not saved
        assert layer.weight_format.unpacks(layer) == (compute == "bf16")


def test_stored_bytes_depend_on_the_products_only_where_they_are_rotated() -> None:
    layer = nn.Linear(64, 48).requires_grad_(False)
    for name, rotates, same in (("int8", True, False), ("int8", False, True), ("fp8", True, True)):
        plain = quantised(name, "", "bf16").packed(layer).state_dict()
        found = quantised(name, "", name, rotates=rotates).packed(layer).state_dict()
        assert found.keys() == plain.keys() and torch.equal(found["weight"], plain["weight"]) == same
        assert {key: tensor.shape for key, tensor in found.items()} == {key: t.shape for key, t in plain.items()}


def test_a_product_of_e4m3fnuz_is_that_of_e4m3fn_with_the_scale_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.arange(-128, 128).to(torch.int8)
    codes = codes[(codes & 0x7F) != 0x7F]  # without NaN
    wanted = codes.view(torch.float8_e4m3fn).double()
    assert torch.equal(2 * as_fnuz(codes).view(torch.float8_e4m3fnuz).double(), wanted)
    reread = codes.view(torch.float8_e4m3fnuz).double()
    assert reread.isnan().sum() == 1 and not torch.equal(reread[1:], wanted[1:]), "the control: bytes read as they are"

    def product(x: Tensor, w: Tensor, scale_a: Tensor, scale_b: Tensor, **how: Any) -> Tensor:
        formats.append(x.dtype)
        return ((x.double() @ w.double()) * scale_a * scale_b).to(how["out_dtype"])

    formats: list[torch.dtype] = []
    monkeypatch.setattr(torch, "_scaled_mm", product)
    found = []
    x_MK, w_NK = (torch.randint(-128, 127, (20, 32)).to(torch.int8) for _ in range(2))
    x_MK, w_NK = (codes.masked_fill((codes & 0x7F) == 0x7F, 1) for codes in (as_fnuz(x_MK), w_NK))
    w_NK[0] = -128
    for is_fnuz in (False, True):
        monkeypatch.setattr(eight_bit_library, "fnuz", lambda device, found=is_fnuz: found)
        scale_M1 = torch.rand(20, 1)
        found.append(eight_bit_library.fp8_product(x_MK, w_NK, scale_M1 / scale_M1, None, None, fast=True))
    assert torch.equal(*found) and formats == [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


def test_the_table_names_the_format_of_each_target() -> None:
    assert {gfx for gfx in TARGETS if has_fnuz(gfx)} == {"gfx942"} and not has_fnuz(None)
    assert all((target.fp8 is not None) == ("fp8" in target.products) for target in TARGETS.values())
    assert {gfx for gfx in TARGETS if refusal_of(gfx, "int8") is None} == {"gfx942", "gfx950", "gfx1200", "gfx1201"}
    assert refusal_of("gfx9999", "fp8") and refusal_of(None, "int8")


def test_scales_are_padded_because_whole_tiles_are_read() -> None:
    for count in (1, 255, 256, 257):
        scale_M1 = torch.rand(count, 1)
        found = padded(scale_M1)
        assert torch.equal(found, scale_M1) and found.untyped_storage().nbytes() >= 4 * (-(-count // 256) * 256)
    made = scaled_rows(torch.randn(20, 64), INT8, None, 0, "eager")[1]
    assert padded(made) is made, "these have the room already"


def machine(monkeypatch: pytest.MonkeyPatch, gfx: str | None, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(backend, "refusal", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", "7.2" if gfx else None)
    monkeypatch.setattr(eight_bit_library, "gfx_of", lambda device: gfx)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("gfx", "environ", "sound"),
    [
        ("gfx1201", {}, True),
        ("gfx942", {}, True),
        ("gfx1201", {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}, False),
        ("gfx1100", {}, False),
        ("gfx1030", {}, False),
        (None, {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}, True),
    ],
)
def test_a_start_refuses_where_a_gpu_or_the_profile_does(
    gfx: str | None, environ: dict[str, str], sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, gfx)
    require("int8", torch.device("cpu"), {})
    if sound:
        require("int8", GPU, environ)
        return
    with pytest.raises(MachineError) as caught:
        require("int8", GPU, environ)
    assert caught.value.code == "eight-bit-refused" and caught.value.where == "model.compute: int8"


def test_a_start_refuses_an_old_gpu_and_one_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, None, (8, 6))
    require("int8", GPU, {})
    with pytest.raises(MachineError):
        require("fp8", GPU, {})
    machine(monkeypatch, None, (9, 0))
    require("fp8", GPU, {})
    monkeypatch.setattr(backend, "refusal", lambda device: "it has no Triton")
    with pytest.raises(MachineError):
        require("fp8", GPU, {})


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_pass_over_tensors_without_numbers_names_the_kernels(name: str) -> None:
    layer = packed(name).to("meta", torch.bfloat16)
    layer.weight_scale = layer.weight_scale.float()
    layer.implementation = "triton"
    with backend.kernels_seen() as seen:
        x = torch.empty(40, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        layer(x).sum().backward()
    sums = {"eight_bit.scaled_sums: int8"} if name == "int8" else set()
    seen_always = {"eight_bit.turned: int8", f"eight_bit.scaled_rows: {name}", f"eight_bit.product: {name}"}
    assert seen == seen_always | sums


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_kernel_that_is_not_proven_is_computed_plainly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the product, for which torch's library is otherwise called."""
    layer = packed(name).bfloat16()
    layer.weight_scale = layer.weight_scale.float()
    x = torch.randn(40, 64).bfloat16()
    wanted = layer(x)
    layer.implementation = "triton"
    kernels = [f"eight_bit.{kernel}: {name}" for kernel in ("scaled_rows", "product", "scaled_sums")]
    backend.use_plain(kernels)
    try:
        found = layer(x)
        with backend.kernels_seen() as seen:
            layer.to("meta")(x.to("meta"))
    finally:
        backend.use_plain(())
    assert torch.equal(found, wanted) and not seen


class Library:
    """In place of torch's library on a GPU: its integer product on the CPU, and float64 for fp8. It may be wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault = "none"
        monkeypatch.setattr(eight_bit_library, "multiplies_on", lambda device: True)
        monkeypatch.setattr(eight_bit_library, "int8_product", self.int8)
        monkeypatch.setattr(eight_bit_library, "fp8_product", self.fp8)
        for kernel in ("scaled_rows", "scaled_sums", "turned"):
            monkeypatch.setattr(eight_bit, kernel, partial(plainly, getattr(eight_bit, kernel)))

    def int8(self, codes_MK: Tensor, codes_NK: Tensor) -> Tensor:
        return self.spoiled(torch._int_mm(codes_MK, codes_NK.t()))

    def fp8(
        self, x: Tensor, w: Tensor, scale_M1: Tensor, scale_N1: Tensor | None, bias: Tensor | None, *, fast: bool
    ) -> Tensor:
        x, w = (codes.view(torch.float8_e4m3fn).double() for codes in (x, w))
        return self.spoiled(x @ w.t() * scale_M1 * (1 if scale_N1 is None else scale_N1.t())).bfloat16()

    def spoiled(self, made_MN: Tensor) -> Tensor:
        faulty_MN = made_MN.clone()
        match self.fault:
            case "scale":  # of a row
                faulty_MN[3] = 0
            case "column":
                faulty_MN[:, 5] = made_MN[:, 6]
            case "few columns":  # from a certain number on (ROCm/bitsandbytes#94)
                faulty_MN[:, 128:] = 0
            case "sign":
                faulty_MN[0, 0] = -made_MN[0, 0]
        return faulty_MN


def plainly(kernel: Any, *given: Any) -> Any:
    return kernel(*given[:-1], "eager")


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("fault", ["none", "scale", "column", "few columns", "sign"])
def test_a_product_of_a_library_that_is_wrong_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Library(monkeypatch).fault = fault
    cases = [case for case in IN_EIGHT_BITS if case.kernels == (f"eight_bit.product: {name}",)]
    said = first_wrong(torch.device("cpu"), torch.bfloat16, cases)
    assert (said is None) == (fault == "none"), said


def test_a_product_that_fails_at_a_later_start_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After an update of the driver: the start notices it, and its steps are in plain PyTorch."""
    library, said = Library(monkeypatch), list[str]()
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "refusal", lambda device: None)
    monkeypatch.setattr(kernel_choice, "compiled_here", lambda: nullcontext([]))
    compare = kernel_choice.first_wrong
    monkeypatch.setattr(kernel_choice, "first_wrong", lambda *how: None if how[2] == [FINGERPRINTS] else compare(*how))

    def choose(stack: str) -> bool:
        monkeypatch.setenv(STACK, stack)
        said.clear()
        kernels = ["eight_bit.product: int8"]
        return kernel_choice.choose(torch.device("cpu"), torch.bfloat16, kernels, context=hearing(said)).triton

    assert choose("driver 1") and len(said) == 1
    library.fault = "few columns"
    assert choose("driver 1") and not said, "it is proven for this driver"
    assert not choose("driver 2") and len(said) == 2 and "product in int8" in said[1]
