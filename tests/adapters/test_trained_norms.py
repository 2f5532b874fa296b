"""Norms trained together with the adapter: LyCORIS' differences under its names, read back by LyCORIS' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.modules.norms import NormModule
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.trained_norms import TrainedNorm
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.recipe.load import load_recipe
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW, tiny_recipe, trained, unet_output, write_tiny_sdxl
from tests.wording import saying

CPU = torch.device("cpu")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
KINDS = (nn.GroupNorm, nn.LayerNorm)
LORA: dict[str, Any] = {"rank": 2, "targets": MIDDLE_TARGETS, "train_norms": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW)


@pytest.mark.parametrize(("norm", "shape"), [(nn.GroupNorm(2, 8), (2, 8, 3, 3)), (nn.LayerNorm(8), (2, 3, 8))])
def test_a_norm_is_that_of_lycoris(norm: Any, shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    ours, theirs = TrainedNorm(norm), NormModule("x", norm, 1)
    x = torch.randn(shape, generator=rng)
    torch.testing.assert_close(ours(x), norm(x))
    for role, tensor in ours.trained().items():
        tensor.data.normal_(generator=rng)
        getattr(theirs, role).data.copy_(tensor)
    torch.testing.assert_close(ours(x), theirs(x))
    assert not torch.allclose(ours(x), norm(x), atol=0.1)
    ours.strength = 0.0
    torch.testing.assert_close(ours(x), norm(x))


@pytest.mark.slow
def test_they_are_trained_written_and_read_back(folder: Path, tmp_path: Path) -> None:
    family, model, adapter = trained(folder, lora=LORA)
    unet = model.components["unet"]
    base = family.load(torch.float32, CPU).components["unet"]
    norms = [m for m in base.modules() if type(m) in KINDS]
    assert len(adapter.norms) == len(norms) and all(n.w_norm.any() for n in adapter.norms.values()), "all are trained"
    rates = {name for group in adapter.groups(family.recipe.optim, family.recipe.lora) for name in group["names"]}
    assert rates == adapter.leaves.keys() == adapter.state().keys()
    made = unet_output(unet)
    with adapter.disabled():
        torch.testing.assert_close(unet_output(unet), unet_output(base))
    # The file
    path = tmp_path / "lora.safetensors"
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": "fp32"})})
    writers.write("kohya", path, family, adapter, recipe, FACTS)
    tensors = load_file(path)
    assert "lora_unet_out_0.w_norm" in tensors and "lora_unet_input_blocks_1_0_in_layers_0.b_norm" in tensors
    found = writers.verify("kohya", path, family, model, adapter)
    assert any("diffusers" in text for text in found.cannot_read)
    # LyCORIS' code writes the file's norms into the base
    by_lycoris = family.load(torch.float32, CPU)
    modules = by_lycoris.components["unet"].named_modules()
    own = {family.lora_file_names.key("unet", name): module for name, module in modules if type(module) in KINDS}
    for key, norm in own.items():
        with torch.no_grad():
            parts = (tensors[f"{key}.{role}"] for role in ("w_norm", "b_norm"))
            theirs = NormModule.make_module_from_state_dict(key, norm, *parts)
            weight, bias = theirs.get_merged_weight()
            norm.weight.copy_(weight)
            norm.bias.copy_(bias)
    attached = attach_file(family, by_lycoris, without_norms(tensors, tmp_path))
    assert attached is not None and not attached.norms
    torch.testing.assert_close(unet_output(by_lycoris.components["unet"]), made, rtol=1e-4, atol=1e-5)
    # Ours: drawn with, and started from
    again = family.load(torch.float32, CPU)
    attach_file(family, again, path)
    torch.testing.assert_close(unet_output(again.components["unet"]), made, rtol=1e-4, atol=1e-5)
    started = tiny_recipe(folder, lora={**LORA, "init_from": str(path)})
    other = family.load(torch.float32, CPU)
    inject(family_for(started), other, started.lora, 3)
    torch.testing.assert_close(unet_output(other.components["unet"]), made, rtol=1e-4, atol=1e-5)
    # Refused
    plain = tiny_recipe(folder, lora={**LORA, "train_norms": False, "init_from": str(path)})
    with pytest.raises(AdapterError, match="trained norms") as caught:
        inject(family_for(plain), family.load(torch.float32, CPU), plain.lora, 3)
    assert "lora.train_norms: true" in caught.value.fix
    with pytest.raises(AdapterError, check=saying("adapters/cannot-be-written-in-the-diffusers-form")):
        writers.write("diffusers", tmp_path / "d.safetensors", family, adapter, recipe, FACTS)
    with torch.no_grad():
        adapter.parameters[next(name for name in adapter.parameters if name.endswith("b_norm"))].add_(0.1)
    with pytest.raises(ExportError, check=saying("adapters/b-norm-has-another-effect")):
        writers.verify("kohya", path, family, model, adapter)


def test_norms_in_fp16_beside_an_ia3_in_float32_are_checked_by_the_rounding_of_fp16(
    folder: Path, tmp_path: Path
) -> None:
    """A number that is off by more than fp16's rounding is found."""
    (family, model, adapter), path = (
        trained(folder, lora={**LORA, "type": "ia3", "rank": 16}),
        tmp_path / "x.safetensors",
    )
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    tensors = load_file(path)
    name = "lora_unet_out_0.w_norm"
    assert {tensor.dtype for key, tensor in tensors.items() if "norm" not in key} >= {torch.float32}
    assert tensors[name].dtype == torch.float16
    writers.verify("kohya", path, family, model, adapter)
    tensors[name][0] = torch.nextafter(tensors[name][0], torch.tensor(1.0, dtype=torch.float16)) * 1.01
    save_file(tensors, path)
    with pytest.raises(ExportError, check=saying("adapters/name-has-another-effect", name=name)):
        writers.verify("kohya", path, family, model, adapter)


def without_norms(tensors: dict[str, Tensor], folder: Path) -> Path:
    save_file({n: t for n, t in tensors.items() if not n.endswith("_norm")}, folder / "plain.safetensors")
    return folder / "plain.safetensors"


def test_the_fused_unet_sees_them(folder: Path) -> None:
    family, model, adapter = trained(folder, lora=LORA)
    unet = model.components["unet"]
    before = unet_output(unet)
    family.fuse(model, triton=False)
    torch.testing.assert_close(unet_output(unet), before, rtol=1e-4, atol=1e-5)
    with adapter.scaled(0.5):
        assert float((unet_output(unet) - before).abs().max()) > 1e-4


def test_who_cannot_train_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rest = "data: {path: a}\ntrain: {epochs: 1}\nlora: {train_norms: true}\n"
    text = "model: {{family: {}, name_or_path: x}}\n"
    (tmp_path / "r.yaml").write_text(text.format("flux") + rest, encoding="utf-8")
    with pytest.raises(Exception, match="lora.train_norms") as caught:
        load_recipe("r.yaml")
    assert ":4 " in str(caught.value)
    (tmp_path / "r.yaml").write_text(text.format("sdxl") + rest + "output: {formats: [peft]}\n", encoding="utf-8")
    with pytest.raises(Exception, match="as peft"):
        load_recipe("r.yaml")
    (tmp_path / "r.yaml").write_text(text.format("sdxl") + rest, encoding="utf-8")
    assert load_recipe("r.yaml").recipe.lora.train_norms
