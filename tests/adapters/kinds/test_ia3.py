"""IA3: its computation, its files in other programs, and the start from existing files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.kinds.ia3 import Ia3Adapter, Ia3Entry
from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.adapters.registry import kind_for
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.recipe.adapter_sections import Ia3Section
from tests.lora_files import write_as_forecast
from tests.tiny_models import SHALLOW_WIDER, tiny_recipe, trained, unet_output, write_tiny_sdxl

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

CPU = torch.device("cpu")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
IA3 = {"type": "ia3", "targets": r"mid_block\.(attentions\.0\.(proj_in|.*\.to_q)|resnets\.0\.conv1)"}
KEY = "lora_unet_middle_block_1_proj_in"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)
    shared.cache_clear()


@cache
def shared(folder: Path) -> tuple[Any, Any, Any]:
    """(family, model, adapter), for tests that leave them as they are."""
    return trained(folder, lora=IA3)


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    family, _, adapter = shared(folder)
    write_as_forecast("kohya", path, family, adapter, family.recipe, FACTS)
    return path


def test_layers_compute_the_formula(folder: Path) -> None:
    """The bias stays."""
    _, _, adapter = shared(folder)
    for _, _, layer in adapter.modules.values():
        base, stretch = layer.get_base_layer(), layer.ia3_stretch[PEFT_NAME].detach()
        conv = isinstance(base, nn.Conv2d)
        x = torch.randn(2, base.in_channels, 6, 4) if conv else torch.randn(2, 3, base.in_features)
        weight = torch.stack([row * (1 + factor) for row, factor in zip(base.weight, stretch, strict=True)])
        expected = F.conv2d(x, weight, base.bias, 1, base.padding) if conv else F.linear(x, weight, base.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert (expected - base(x)).norm() > 50 * (layer(x) - expected).norm(), "else the comparison says nothing"
        assert kind_for(Ia3Section(**IA3)).weights_of(Ia3Section(**IA3), base.weight.shape) == stretch.numel()


def test_a_fresh_adapter_changes_nothing_and_can_be_trained(folder: Path) -> None:
    recipe = tiny_recipe(folder, lora=IA3)
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    plain = unet_output(model.components["unet"])
    adapter = inject(family, model, recipe.lora, 3)
    torch.testing.assert_close(unet_output(model.components["unet"]), plain)
    layer = adapter.modules["unet.mid_block.attentions.0.proj_in"][2]
    assert torch.autograd.grad(layer(torch.randn(2, 32)).square().sum(), layer.ia3_stretch[PEFT_NAME])[0].all()
    assert list(adapter.smaller(recipe.lora)) == []
    with pytest.raises(ValueError, match="no rank"):
        tiny_recipe(folder, lora={**IA3, "rank": 4})


def test_dropout_is_on_what_is_stretched_and_in_training_alone(folder: Path) -> None:
    _, _, adapter = trained(folder, lora=IA3 | {"dropout": 0.5})
    _, _, layer = adapter.modules["unet.mid_block.attentions.0.proj_in"]
    base, stretch, x = layer.get_base_layer(), layer.ia3_stretch[PEFT_NAME].detach(), torch.randn(2, 32)
    whole = (base(x) - base.bias) * stretch
    torch.testing.assert_close(layer.eval()(x), base(x) + whole, rtol=1e-4, atol=1e-5)
    torch.manual_seed(5)
    dropped = torch.nn.functional.dropout(base(x) - base.bias, 0.5)
    torch.manual_seed(5)
    found = layer.train()(x) - base(x)
    torch.testing.assert_close(found, dropped * stretch, rtol=1e-3, atol=1e-5, msg="drawn once")
    kept = found.abs() > whole.abs()
    torch.testing.assert_close(found, 2 * whole * kept, rtol=1e-3, atol=1e-5)
    assert 0 < kept.sum() < kept.numel()


WRONG = {
    "one number": lambda t: t[f"{KEY}.weight"][0].add_(0.01),
    "a missing number": lambda t: t.update({f"{KEY}.weight": t[f"{KEY}.weight"][1:].clone()}),
    "a missing module": lambda t: [t.pop(f"{KEY}.{name}") for name in ("weight", "on_input")],
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_caught(folder: Path, file: Path, tmp_path: Path, fault: str) -> None:
    """A correct file passes, and the result names the programs that cannot read IA3."""
    family, model, adapter = shared(folder)
    said = writers.verify("kohya", file, family, model, adapter).cannot_read
    assert any("ComfyUI" in words for words in said) and any("convolutions" in words for words in said)
    tensors = load_file(file)
    WRONG[fault](tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ExportError):
        writers.verify("kohya", tmp_path / "x.safetensors", family, model, adapter)


def test_a_file_is_attached_and_starts_a_run(folder: Path, file: Path) -> None:
    family, model, adapter = shared(folder)
    bare = family.load(torch.float32, CPU)
    attached = attach_file(family, bare, file)
    assert isinstance(attached, Ia3Adapter) and attached.modules.keys() == adapter.modules.keys()
    torch.testing.assert_close(unet_output(bare.components["unet"]), unet_output(model.components["unet"]))
    recipe = tiny_recipe(folder, lora=IA3 | {"init_from": str(file)})
    started = inject(family_for(recipe), family.load(torch.float32, CPU), recipe.lora, 3)
    assert all(torch.equal(tensor, adapter.state()[name]) for name, tensor in started.state().items())


@pytest.mark.parametrize(("weight", "on_input", "code"), [
    ((32,), 1, "lora-parts"),
    ((31,), 0, "lora-of-another-model"),
    ((32,), None, "lora-kind"),
])  # fmt: skip
def test_what_is_no_ia3(folder: Path, tmp_path: Path, weight: tuple[int, ...], on_input: int | None, code: str) -> None:
    """LyCORIS writes on_input as a whole number."""
    family, path = family_for(tiny_recipe(folder)), tmp_path / "x.safetensors"
    components = {"unet": family.skeleton("unet")}
    save_file({f"{KEY}.weight": torch.ones(32), f"{KEY}.on_input": torch.tensor(0)}, path)
    assert isinstance(read_lora(family, components, path).popitem()[1], Ia3Entry)
    tensors = {f"{KEY}.weight": torch.ones(weight)}
    save_file(tensors if on_input is None else tensors | {f"{KEY}.on_input": torch.tensor(on_input)}, path)
    with pytest.raises(AdapterError) as caught:
        read_lora(family, components, path)
    assert caught.value.code == code


def test_rows_are_cut_and_joined_exactly() -> None:
    entry, weight = Ia3Entry(torch.randn(6), 0.5, (6, 4)), torch.randn(6, 4)
    torch.testing.assert_close(entry.rows(2, 3).effect(weight[2:5]), entry.effect(weight)[2:5])
    joined = entry.rows(0, 2).joined([(0, entry.rows(0, 2)), (3, entry.rows(3, 3))], 6).effect(weight)
    torch.testing.assert_close(joined[[0, 1, 3, 4, 5]], entry.effect(weight)[[0, 1, 3, 4, 5]])
    assert not joined[2].any()
