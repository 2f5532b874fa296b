"""Products in eight bits on a GPU: errors against float64, graphs, joined projections, and a resume to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from lora_rocm.checks.kernel_check import IN_EIGHT_BITS, ExactCase, first_wrong
from lora_rocm.errors import MachineError
from lora_rocm.kernels import eight_bit, eight_bit_library
from lora_rocm.kernels.lora_layer import LoraLinear
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import dense_weight
from tests.tiny_models import SHALLOW_WIDER, write_tiny_sdxl
from tests.train.runs import bytes_of, make_recipe, material, rewound, start

pytestmark = [
    pytest.mark.gpu,
    # torch: of the thread of the backward pass, which had no context; and of leaves whose first pass had another stream
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]
__all__ = ["material"]
GPU = torch.device("cuda")
ERRORS = {"int8": 0.013, "fp8": 0.04}
"""Largest relative error with normally distributed numbers: rounding to eight bits, and to bf16."""


@pytest.fixture(params=["fp8", "int8"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    try:
        eight_bit_library.require(found, GPU)
    except MachineError as error:
        pytest.skip(error.what)
    return found


def packed(name: str, inputs: int, outputs: int, bias: bool = True) -> Any:
    torch.manual_seed(inputs + outputs)
    layer = nn.Linear(inputs, outputs, bias=bias, device=GPU, dtype=torch.bfloat16).requires_grad_(False)
    found = quantised(name, "", name).packed(layer)
    found.implementation = "triton"
    return found


def adapted(base: nn.Module) -> Any:
    layer = LoraLinear(base, "default", LoraConfig(r=16, lora_alpha=16), r=16, lora_alpha=16).to(GPU, torch.bfloat16)
    base.get_buffer("weight_scale").data = base.get_buffer("weight_scale").float()
    nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return layer


def off(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1024, 3072, 3072), (77, 640, 2560), (17, 64, 48), (4608, 3072, 12288)]
)
def test_products_and_gradients_are_those_of_float64(name: str, rows: int, inputs: int, outputs: int) -> None:
    layer = packed(name, inputs, outputs)
    x = torch.randn(rows, inputs, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, outputs, device=GPU, dtype=torch.bfloat16) * 1e-6
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    weight_OI = dense_weight(layer).double()
    assert y.dtype == dx.dtype == torch.bfloat16
    assert ERRORS[name] / 5 < off(y, x.double() @ weight_OI.T + layer.bias.double()) < ERRORS[name]
    assert ERRORS[name] / 5 < off(dx, dy.double() @ weight_OI) < ERRORS[name]


def test_few_rows_are_multiplied_by_the_stored_numbers(name: str) -> None:
    layer = packed(name, 3072, 640)
    x = torch.randn(3, 3072, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(3, 640, device=GPU, dtype=torch.bfloat16)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    weight_OI = dense_weight(layer).double()
    assert off(y, x.double() @ weight_OI.T + layer.bias.double()) < 0.006 and off(dx, dy.double() @ weight_OI) < 0.006


def test_every_case_passes_its_comparison_and_a_wrong_product_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in IN_EIGHT_BITS if case.kernels[0].endswith(name)]
    assert len(cases) == 2 and isinstance(cases[0], ExactCase)
    assert first_wrong(GPU, torch.bfloat16, cases) is None
    library = f"{name}_product"
    product: Callable[..., Tensor] = getattr(eight_bit_library, library)

    def spoiled(*given: Any, **how: Any) -> Tensor:
        made_MN = product(*given, **how)
        made_MN[:, 40:] = 0
        return made_MN

    monkeypatch.setattr(eight_bit_library, library, spoiled)
    assert first_wrong(GPU, torch.bfloat16, cases) is not None


def test_a_captured_pass_gives_the_bytes_of_an_eager_one(name: str) -> None:
    layer = adapted(packed(name, 640, 1280))
    x = torch.randn(2, 200, 640, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(2, 200, 1280, device=GPU, dtype=torch.bfloat16)
    leaves = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]

    def passed() -> list[Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            passed()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passed()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(dy))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.detach().clone() for tensor in captured]
        with torch.cuda.stream(stream):  # on which autograd's nodes for the leaves were made
            eager = passed()
        stream.synchronize()
        for one, other in zip(replayed, eager, strict=True):
            assert torch.equal(one, other)


def test_joined_projections_are_those_of_each_layer(name: str) -> None:
    layers = [adapted(packed(name, 640, outputs, bias=False)) for outputs in (640, 320, 1280)]
    merged = MergedLinears.of(*layers)
    assert merged is not None
    found: list[list[Tensor]] = []
    for together in (True, False):
        torch.manual_seed(3)
        x = torch.randn(300, 640, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        outputs = merged(layers, x) if together else [layer(x) for layer in layers]
        dys = [torch.randn_like(y) for y in outputs]
        weights = [pair.weight for layer in layers for pair in (layer.lora_A["default"], layer.lora_B["default"])]
        found.append([*outputs, *torch.autograd.grad(outputs, [x, *weights], dys)])
    for one, other in zip(*found, strict=True):
        assert off(one, other) < 0.01


def test_both_implementations_give_the_same_codes_and_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = packed(name, 3072, 3072), torch.randn(1024, 3072, device=GPU, dtype=torch.bfloat16)
    found = layer(x)
    layer.implementation = "eager"
    assert off(found, layer(x)) < 0.006, "bf16 rounds the plain sums once more"
    monkeypatch.setattr(eight_bit, "TINY", 1e9)
    assert off(found, layer(x)) > 0.5, "the control"


def test_a_number_that_is_not_finite_stays_visible(name: str) -> None:
    layer, x = packed(name, 640, 640), torch.randn(40, 640, device=GPU, dtype=torch.bfloat16)
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    y = layer(x)
    assert not y[3:5].isfinite().any() and y[5:].isfinite().all() and y[:3].isfinite().all()


def test_a_run_resumes_to_the_byte(name: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    wider = material / "wide enough for products in eight bits"
    base = wider if wider.exists() else write_tiny_sdxl(wider, **SHALLOW_WIDER)
    recipe = make_recipe(
        material,
        model={"name_or_path": str(base), "quantization": name, "compute": name},
        train={"max_train_steps": 2, "gradient_accumulation_steps": 1, "mixed_precision": "bf16"},
        output={"save_every_n_steps": 1},
        runtime={"profile": "fast", "deterministic": True},
    )
    straight, broken, dense = (tmp_path / each for each in ("straight", "broken", "dense"))
    assert start(recipe, straight, device=GPU)
    rewound(straight, broken, 1)
    assert start(recipe, broken, device=GPU)
    assert bytes_of(broken) == bytes_of(straight)
    in_bf16 = recipe.model_copy(update={"model": recipe.model.model_copy(update={"compute": "bf16"})})
    assert start(in_bf16, dense, device=GPU)
    assert bytes_of(dense) != bytes_of(straight), "the control"
