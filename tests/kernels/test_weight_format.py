"""Frozen weights in the formats of ``model.quantization``, through all code that touches frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.base import Adapter
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.placement.offloaded import Offload
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.common.unet.fused_unet import MergedProjections
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import DENSE, PackedLinear, dense_weight, is_packed, pack
from lora_rocm.memory.footprint import count, meta_model
from tests.tiny_models import FEW_TARGETS, SHALLOW_WIDER, tiny_recipe, write_tiny_sdxl
from tests.wording import saying

CPU = torch.device("cpu")


FORMATS = ("int8", pytest.param("fp8", marks=pytest.mark.slow), "nf4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("models") / "m", **SHALLOW_WIDER)


def recipe(folder: Path, quantization: str, **lora: Any) -> Any:
    lora = {"rank": 2, "targets": (FEW_TARGETS,), **lora}
    return tiny_recipe(folder, model={"quantization": quantization}, lora=lora)


def trained(folder: Path, quantization: str, **lora: Any) -> tuple[Sdxl, LoadedModel, Adapter]:
    family = Sdxl(recipe(folder, quantization, **lora))
    model = family.load(torch.float32, CPU)
    adapter = inject(family, model, family.recipe.lora, 1)
    with torch.no_grad():
        for leaf in adapter.leaves.values():
            leaf.normal_(std=0.1, generator=torch.Generator().manual_seed(leaf.numel()))
    return family, model, adapter


def made_dense(model: LoadedModel) -> None:
    """The same numbers in plain layers: the reference."""
    for parent in list(model.components["unet"].modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, PackedLinear):
                dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                dense.weight, dense.bias = nn.Parameter(dense_weight(layer), requires_grad=False), layer.bias
                setattr(parent, name, dense)


def example(family: Sdxl, rows: int = 2) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch = family.example(SampleShape.of(h=64, w=64), rows)
    return batch, family.objective.draw(batch, list(range(rows))).tensors


def gradients(family: Sdxl, model: LoadedModel, adapter: Adapter, rows: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    batch, draws = example(family, rows)
    model.components["unet"].train()
    for leaf in adapter.leaves.values():
        leaf.grad = None
    loss_B = losses(family, model, batch, draws)
    loss_B.sum().backward()
    return loss_B.detach(), {name: leaf.grad.clone() for name, leaf in adapter.leaves.items()}


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_is_that_of_the_dequantised_model(folder: Path, name: str) -> None:
    """Also recomputed, and with its blocks offloaded; the unrounded base gives something else (negative control)."""
    family, model, adapter = trained(folder, name)
    packed = [layer for layer in model.components["unet"].modules() if is_packed(layer)]
    assert len(packed) == 4 * 10 and all(layer.weight.dtype == torch.int8 for layer in packed)
    found = gradients(family, model, adapter)
    family.recompute_activations(model, Recomputing(model))
    recomputed = gradients(family, model, adapter)
    transfer = DeviceTransfer(CPU, pin=False)
    blocks = family.blocks(model)
    offload = Offload(blocks, Resident(transfer), pin=False)
    offloaded = gradients(family, model, adapter)
    assert offload.fetched_bytes >= offload.host_bytes and float(transfer.bad) == 0
    if name != "nf4":  # the tables of a layer are as large as these tiny layers
        assert offload.host_bytes < sum(p.numel() * 4 for block in blocks for p in block.parameters())
    offload.close()
    made_dense(model)
    reference = gradients(family, model, adapter)
    for each in (found, recomputed, offloaded):
        assert_same(each, reference)
    unrounded = Sdxl(recipe(folder, "none"))
    other = unrounded.load(torch.float32, CPU)
    exact = inject(unrounded, other, unrounded.recipe.lora, 1)
    exact.load(adapter.state())
    assert not torch.allclose(gradients(unrounded, other, exact)[0], reference[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_projections_of_packed_layers_are_merged(folder: Path, name: str) -> None:
    family, model, adapter = trained(folder, name)
    expected = gradients(family, model, adapter)
    family.fuse(model, triton=False)
    merged = [
        layer.processor
        for layer in model.components["unet"].modules()
        if isinstance(getattr(layer, "processor", None), MergedProjections)
    ]
    assert len(merged) == 4 * 2 and all(processor.merged.weight_OI is None for processor in merged)
    assert_same(gradients(family, model, adapter), expected)
    layer = next(layer for layer in model.components["unet"].modules() if isinstance(layer, PackedLinear))
    with torch.no_grad():
        layer.weight.add_(1)
    assert not torch.allclose(gradients(family, model, adapter)[0], expected[0], rtol=1e-5, atol=0), "the control"


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_layer_keeps_nothing_dense_for_the_backward_pass(name: str) -> None:
    layer = nn.Linear(64, 64).requires_grad_(False)
    parent = nn.Sequential(layer)
    pack(parent, quantised(name, "0"))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        parent(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert not any(tensor.is_floating_point() and tensor.numel() >= 64 * 64 for tensor in kept)
    assert is_packed(parent[0]) and not is_packed(layer)


def test_fingerprints_are_of_what_is_stored(folder: Path) -> None:
    _, model, _ = trained(folder, "int8")
    placement = Resident(DeviceTransfer(CPU, pin=False))
    placement.place(model.components["unet"], "unet")
    layer = next(path for path, each in model.components["unet"].named_modules() if is_packed(each))
    assert {f"unet.{layer}.weight", f"unet.{layer}.weight_scale"} <= placement.on_device().keys()
    assert placement.changed() == []
    model.components["unet"].get_submodule(layer).weight_scale[0] += 1e-6  # type: ignore[index,operator]
    assert placement.changed() == [f"unet.{layer}.weight_scale"]


@pytest.mark.parametrize("name", ["nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8"))])
def test_the_counted_model_has_the_bytes_of_the_format(folder: Path, name: str) -> None:
    its = recipe(folder, name)
    family = Sdxl(its)
    skeleton = family.skeleton("unet")
    expected = family.weight_format("unet").num_bytes(skeleton, torch.bfloat16)
    stored = family.load(torch.bfloat16, CPU).components["unet"]
    hollow = meta_model(family, its, torch.bfloat16, False).components["unet"]
    sizes = [
        sum(t.numel() * t.element_size() for t in (*m.parameters(), *m.buffers()) if not t.requires_grad)
        for m in (stored, hollow)
    ]
    assert sizes == [expected, expected] and DENSE.num_bytes(skeleton, torch.bfloat16) > expected


@pytest.mark.slow
def test_the_footprint_is_smaller(folder: Path) -> None:
    packed, dense = (
        count(Sdxl(its), meta_model(Sdxl(its), its, torch.bfloat16, False), its, SampleShape.of(h=64, w=64))
        for its in (recipe(folder, "int8"), recipe(folder, "none"))
    )
    assert packed.weight_bytes < dense.weight_bytes


def test_a_dora_on_a_packed_base_is_refused(folder: Path) -> None:
    """PEFT would take the stored integers for the weight. The recipe refuses it before."""
    with pytest.raises(ValidationError, check=saying("kernels/dora-needs-dense-weights-and-model-quantization")):
        recipe(folder, "int8", use_dora=True)
    family, model, _ = trained(folder, "none", use_dora=True)
    pack(model.components["unet"], quantised("int8", ""))
    with pytest.raises(AdapterError) as caught:
        family.predict(model, *example(family))
    assert caught.value.code == "dora-packed" and "int8" in str(caught.value)
