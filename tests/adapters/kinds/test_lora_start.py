"""The start of LoRA's factors: nothing changes at the start, the result is PEFT's, and the file is a plain LoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.kinds import lora_start
from lora_rocm.adapters.kinds.lora import LoraAdapter
from lora_rocm.adapters.kinds.lora_start import START, factors, fill_start, less_start
from lora_rocm.errors import AdapterError
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.recipe.adapter_sections import LoraSection
from tests.lora_files import write_as_forecast
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW_RISING, tiny_recipe, unet_output, write_tiny_sdxl
from tests.wording import saying, says_if

CPU = torch.device("cpu")
KINDS = ("gaussian", "orthogonal", "pissa", "olora")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
TARGETS = f"({MIDDLE_TARGETS})|mid_block.resnets.0.conv1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_RISING)


def injected(folder: Path, resumed: bool = False, packed: str = "none", **lora: Any) -> tuple[Any, Any, Adapter]:
    model = {"name_or_path": str(folder), "quantization": packed}
    recipe = tiny_recipe(folder, model=model, lora={"rank": 4, "alpha": 6.0, "targets": TARGETS, **lora})
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    return family, model, inject(family, model, recipe.lora, 3, resumed=resumed)


def moved(adapter: Adapter) -> None:
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter += 0.01 * torch.randn(parameter.shape, generator=rng)


@pytest.mark.slow
@pytest.mark.parametrize("how", KINDS)
def test_the_start_changes_nothing_and_the_file_is_a_lora(folder: Path, tmp_path: Path, how: str) -> None:
    family, model, adapter = injected(folder, init=how)
    _, plain, _ = injected(folder)
    unet = model.components["unet"]
    base = unet_output(plain.components["unet"])
    torch.testing.assert_close(unet_output(unet), base, rtol=1e-4, atol=1e-5)
    name, (_, _, layer) = next((name, found) for name, found in adapter.modules.items() if name.endswith("to_q"))
    up, down = layer.lora_B[PEFT_NAME].weight, layer.lora_A[PEFT_NAME].weight
    assert bool(up.any()) is (how != "gaussian") and down.any(), "the factors are those of the start"
    moved(adapter)
    made = unet_output(unet)
    assert float((made - base).abs().max()) > 1e-3
    # The file, in half precision, on the base itself
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": "fp16"})})
    for form in ("kohya", "peft"):
        path = tmp_path / form / "lora.safetensors" if form == "kohya" else tmp_path / "folder"
        write_as_forecast(form, path, family, adapter, recipe, FACTS)
        other = family_for(recipe)
        read = other.load(torch.float32, CPU)
        attached = attach_file(other, read, path)
        assert attached is not None
        assert attached.modules[name][2].r[PEFT_NAME] == (8 if how in ("pissa", "olora") else 4)
        torch.testing.assert_close(unet_output(read.components["unet"]), made, rtol=2e-3, atol=2e-4)
    with adapter.scaled(0.0):
        torch.testing.assert_close(unet_output(unet), base, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["int8", "nf4"])
def test_a_packed_base_is_unchanged_at_the_start_too(folder: Path, packed: str) -> None:
    """The dtype of a packed weight's bytes is not the dtype in which its layer computes."""
    _, model, adapter = injected(folder, init="olora", packed=packed)
    adapter.cast_inputs(False)
    _, plain, _ = injected(folder, packed=packed)
    torch.testing.assert_close(
        unet_output(model.components["unet"]), unet_output(plain.components["unet"]), rtol=1e-4, atol=1e-5
    )
    pairs = [layer.lora_A[START].weight for _, _, layer in adapter.modules.values()]
    assert {pair.dtype for pair in pairs} == {torch.float32} and all(pair.any() for pair in pairs)


@pytest.mark.parametrize("how", [pytest.param("pissa", marks=pytest.mark.slow), "olora"])
def test_a_resume_has_the_start_of_the_checkpoint(folder: Path, how: str) -> None:
    _, model, adapter = injected(folder, init=how)
    moved(adapter)
    state = adapter.state()
    _, again, resumed = injected(folder, resumed=True, init=how)
    with pytest.raises(AdapterError, check=saying("adapters/lacks-what-its-lora-started-from")):
        resumed.load_constants({})
    resumed.load_constants(state)
    resumed.load(state)
    found = resumed.state()
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    assert torch.equal(unet_output(again.components["unet"]), unet_output(model.components["unet"]))


@pytest.mark.parametrize("how", KINDS)
def test_steps_are_those_of_peft(how: str) -> None:
    """PEFT takes the start off the base; after a few steps the weights are the same."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(size, 6))[0] for size in (12, 10))
    base = nn.Linear(10, 12, bias=False)
    with torch.no_grad():
        base.weight.copy_(u @ torch.diag(torch.tensor([6.0, 5, 4, 3, 0.5, 0.2])) @ v.T)
    section = LoraSection(rank=4, alpha=6.0, init=how)
    ours = nn.Sequential(copy.deepcopy(base))
    LoraAdapter.insert(ours, LoraAdapter.config(section, "0"))
    layer: Any = ours[0]
    theirs = nn.Sequential(copy.deepcopy(base))
    config = LoraConfig(r=4, lora_alpha=6, target_modules="0", init_lora_weights=how)
    inject_adapter_in_model(config, theirs, PEFT_NAME)
    their_layer: Any = theirs[0]
    held: dict[str, Tensor] = {}
    with torch.no_grad():
        down, up = factors(how, base.weight, 4, 1.5, torch.Generator().manual_seed(0))
        if how in ("gaussian", "orthogonal"):  # random: PEFT's numbers have other seeds
            their_layer.lora_A[PEFT_NAME].weight.data.copy_(down)
            their_layer.lora_B[PEFT_NAME].weight.data.copy_(up)
        layer.lora_A[PEFT_NAME].weight.copy_(down)
        layer.lora_B[PEFT_NAME].weight.copy_(up)
        if START in layer.lora_A:
            held = fill_start(layer, down, up)
    x, target = torch.randn(5, 10), torch.randn(5, 12)
    for model, each in ((ours, layer), (theirs, their_layer)):
        weights = [each.lora_A[PEFT_NAME].weight, each.lora_B[PEFT_NAME].weight]
        optimizer = torch.optim.SGD(weights, lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
    trained = {role: tensor.detach() for role, tensor in LoraAdapter.trained(layer, PEFT_NAME).items()}
    entry = LoraAdapter.entry_of(layer, PEFT_NAME, trained)
    entry = less_start(entry, held) if held else entry
    expected = their_layer.get_base_layer().weight + their_layer.get_delta_weight(PEFT_NAME)
    torch.testing.assert_close(base.weight + entry.update(), expected, rtol=1e-3, atol=1e-4)
    assert float(entry.update().abs().max().detach()) > 1e-2, "it was trained"
    assert torch.equal(layer.get_base_layer().weight, base.weight), "the base stays"


@pytest.mark.parametrize(
    ("init", "count"), [("default", 0), ("gaussian", 0), ("orthogonal", 0), ("pissa", 3), ("olora", 3), ("eva", 1)]
)
def test_layers_with_fewer_numbers_than_ranks_are_counted(init: str, count: int) -> None:
    """Eva reads the inputs of linear layers alone; a convolution has its whole window as inputs."""
    layers = {"few_inputs": nn.Linear(3, 9), "few_outputs": nn.Linear(9, 3), "both": nn.Linear(4, 4)}
    root = nn.ModuleDict({**layers, "convolution": nn.Conv2d(2, 3, 3)})
    LoraAdapter.insert_layers(root, LoraConfig(r=4, target_modules=[*root]))
    modules = {name: ("root", name, layer) for name, layer in root.items()}
    adapter: Any = SimpleNamespace(modules=modules, trained=LoraAdapter.trained)
    for name in ("narrow", "linear_downs"):
        setattr(adapter, name, MethodType(getattr(LoraAdapter, name), adapter))
    section = LoraSection(rank=4, init=init)  # type: ignore[arg-type]
    assert LoraAdapter.unstarted(adapter, section) == count
    text = section.unstarted_text(count)
    assert says_if(count, text, "adapters/lora-init-init-fills-only-a-part", init=init)
    assert not count or f"of {count} adapted layer" in text
    assert bool(text) == bool(count)


def test_layers_narrower_than_the_rank_keep_trainable_ranks() -> None:
    for how in ("pissa", "olora"):
        weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
        down, up = factors(how, weight, 16, 2.0, torch.Generator().manual_seed(0))
        assert down.shape == (3, 8) and up.shape == (3, 3)
        product = up @ down * (2.0 if how == "pissa" else 1.0)
        torch.testing.assert_close(product, weight, rtol=1e-4, atol=1e-5)


def test_pissa_starts_from_the_largest_singular_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight has no structure: its singular values are close to each other. Large ones have spare vectors."""
    weight, rank = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)), 8
    u, s, v_t = torch.linalg.svd(weight, full_matrices=False)
    wanted = (u[:, :rank] * s[:rank]) @ v_t[:rank]

    def off() -> float:
        down, up = factors("pissa", weight, rank, 2.0, torch.Generator().manual_seed(0))
        return float((2.0 * up @ down - wanted).norm() / wanted.norm())

    assert off() < 1e-4
    monkeypatch.setattr(lora_start, "EXACT_SIDE", 64)
    torch.manual_seed(0)
    u, s, v = torch.svd_lowrank(weight, rank, niter=lora_start.ITERATIONS)
    without = float(((u * s) @ v.T - wanted).norm() / wanted.norm())
    assert off() < 0.8 * without, "the control: no spare vectors"
