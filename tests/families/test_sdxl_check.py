"""Models of other families are named and refused, from configs and headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.errors import ModelError
from lora_rocm.families.sdxl import Sdxl
from tests.tiny_models import (
    read_json,
    tiny_pipeline,
    tiny_recipe,
    write_config_folder,
    write_single_file,
    write_tiny_sdxl,
)


def refusal(path: Path, **model: Any) -> str:
    """What the refusal says; loading anything would fail the test by itself, since the files are too small."""
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(path, model=model)).source
    assert caught.value.code == "wrong-family"
    assert caught.value.fix
    return caught.value.what


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = read_json(path)
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_sdxl(tmp_path / "m")


@pytest.mark.parametrize(("kind", "extra", "words"), [
    ("StableDiffusionPipeline", {}, "Stable Diffusion 1.x or 2.x"),
    ("StableDiffusion3Pipeline", {"transformer": ["diffusers", "SD3Transformer2DModel"]}, "Stable Diffusion 3"),
    ("FluxPipeline", {"transformer": ["diffusers", "FluxTransformer2DModel"]}, "FLUX"),
    ("QwenImagePipeline", {"transformer": ["diffusers", "X"]}, "Qwen-Image"),
    ("SomeNewPipeline", {"transformer": ["diffusers", "X"]}, "SomeNewPipeline"),
    ("StableDiffusionXLInpaintPipeline", {}, "inpainting"),
    ("StableDiffusionXLImg2ImgPipeline", {"text_encoder": [None, None]}, "refiner"),
])  # fmt: skip
def test_other_pipelines(folder: Path, kind: str, extra: dict[str, Any], words: str) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name=kind, **extra))
    assert words in refusal(folder)


@pytest.mark.parametrize(("changes", "words"), [
    ({"addition_embed_type": None}, "text and time conditioning"),
    ({"in_channels": 9}, "inpainting"),
    ({"in_channels": 8}, "8 channels"),
])  # fmt: skip
def test_other_unets(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit(folder / "unet" / "config.json", lambda config: config.update(changes))
    assert words in refusal(folder)


def test_a_model_without_a_component(folder: Path) -> None:
    (folder / "vae").rename(folder / "elsewhere")
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(folder)).source
    assert caught.value.code == "incomplete-model"
    assert "vae" in caught.value.what


@pytest.mark.parametrize(("name", "words"), [
    ("lora_unet_input_blocks_4_1_proj_in.lora_down.weight", "LoRA file"),
    ("unet.mid_block.attentions.0.proj_in.lora_A.weight", "LoRA file"),
    ("lora_unet_x.hada_w1_a", "LyCORIS"),
    ("model.diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale", "FLUX"),
    ("model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.bias", "Stable Diffusion 3"),
    ("cond_stage_model.transformer.text_model.embeddings.position_ids", "Stable Diffusion 1.x"),
    ("conditioner.embedders.0.model.text_projection", "refiner"),
    ("edm_mean", "Playground"),
    ("blob", "no checkpoint that is known"),
])  # fmt: skip
def test_other_files(tmp_path: Path, name: str, words: str) -> None:
    save_file({name: torch.zeros(1)}, tmp_path / "x.safetensors")
    assert words in refusal(tmp_path / "x.safetensors")


def checkpoint(tmp_path: Path, keep: Callable[[str], bool], **extra: torch.Tensor) -> Path:
    file = write_single_file(tiny_pipeline(), tmp_path / "x.safetensors")
    tensors = {name: tensor for name, tensor in load_file(file).items() if keep(name)}
    save_file({**tensors, **extra}, file)
    return file


def test_an_inpainting_checkpoint(tmp_path: Path) -> None:
    weight = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(16, 9, 3, 3)}
    assert "inpainting" in refusal(checkpoint(tmp_path, lambda name: True, **weight))


@pytest.mark.parametrize(("lost", "words"), [
    ("conditioner.", "text encoders"),
    ("first_stage_model.", "VAE"),
    ("model.diffusion_model.", "UNet"),
])  # fmt: skip
def test_an_incomplete_checkpoint(tmp_path: Path, lost: str, words: str) -> None:
    file = checkpoint(tmp_path, lambda name: not name.startswith(lost))
    config = write_config_folder(tiny_pipeline(), tmp_path / "config")
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(file, model={"config": str(config)})).source
    assert caught.value.code == "incomplete-model"
    assert words in caught.value.what


def test_a_checkpoint_without_vae_is_whole_with_another(tmp_path: Path, folder: Path) -> None:
    file = checkpoint(tmp_path, lambda name: not name.startswith("first_stage_model."))
    config = write_config_folder(tiny_pipeline(), tmp_path / "config")
    recipe = tiny_recipe(file, model={"config": str(config), "vae": str(folder / "vae")})
    assert Sdxl(recipe).source.load("vae", torch.float32, torch.device("cpu"))
