"""Bases of random numbers: real structure, sane numbers, the same each time, no file of weights and no network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lora_rocm.base_models.random_weights import POOL, RandomSource, random_source
from lora_rocm.families.sdxl.family import LAYOUT, Sdxl
from lora_rocm.recipe.load import load_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> RandomSource:
    return random_source("random:builtin:tiny-sdxl", LAYOUT)


def test_the_structure_is_the_models_and_the_numbers_are_not(tiny: RandomSource) -> None:
    family = Sdxl(load_recipe("demo.yaml").recipe)
    real, made = family.source.load("unet", torch.float32, CPU), tiny.load("unet", torch.float32, CPU)
    shapes = [{name: p.shape for name, p in unet.named_parameters()} for unet in (real, made)]
    assert shapes[0] == shapes[1] and not made.training and not any(p.requires_grad for p in made.parameters())
    weight = made.get_parameter("down_blocks.1.resnets.0.conv1.weight")
    assert weight.std().item() == pytest.approx(weight[0].numel() ** -0.5, rel=0.05)
    assert not torch.equal(weight[0], weight[1]) and not torch.equal(weight, made.get_parameter("conv_in.weight"))
    assert bool((made.get_parameter("conv_norm_out.weight") == 1).all())
    assert bool((made.get_parameter("conv_norm_out.bias") == 0).all())


def test_each_load_gives_the_same_weights_in_the_format_asked_for(tiny: RandomSource) -> None:
    one, other = (tiny.load("text_encoder_2", torch.bfloat16, CPU).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {tensor.dtype for tensor in one.values() if tensor.is_floating_point()} == {torch.bfloat16}


def test_a_tensor_goes_on_where_the_pool_ends(monkeypatch: pytest.MonkeyPatch, tiny: RandomSource) -> None:
    assert POOL > 1 << 24
    monkeypatch.setattr("lora_rocm.base_models.random_weights.POOL", 1001)
    weight = tiny.load("unet", torch.float32, CPU).get_parameter("down_blocks.1.resnets.0.conv1.weight").flatten()
    assert torch.equal(weight[:500], weight[1001:1501]) and not torch.equal(weight[:500], weight[500:1000])


def test_configs_come_from_the_model_where_it_is_here_else_from_the_package(tmp_path: Path, tiny: RandomSource) -> None:
    assert tiny.config("unet").values["block_out_channels"] == [48, 80, 112]
    published = random_source("random:stabilityai/stable-diffusion-xl-base-1.0", LAYOUT)
    assert published.config("unet").values["block_out_channels"] == [320, 640, 1280]
    for part in LAYOUT.parts:
        shutil.copytree(tiny.folder / part, tmp_path / "a model ä" / part)
    assert random_source(f"random:{tmp_path / 'a model ä'}", LAYOUT).folder == tmp_path / "a model ä"
    (tmp_path / "a model ä" / "unet" / "config.json").unlink()
    assert random_source(f"random:{tmp_path / 'a model ä'}", LAYOUT).folder == LAYOUT.configs


def test_a_recipe_asks_for_it_by_the_prefix_and_the_family_looks_no_further() -> None:
    family = Sdxl(load_recipe("demo.yaml", ["model.name_or_path=random:nobody/such-model"]).recipe)
    assert family.source.config("unet").values["sample_size"] == 128
    assert [e.entry.name for e in family.encoders() if e.fingerprint] == ["image", "text_1", "text_2"]
    assert family.base_facts()["identity"] != Sdxl(load_recipe("demo.yaml").recipe).base_facts()["identity"]
