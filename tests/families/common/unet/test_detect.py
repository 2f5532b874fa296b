"""Models of other families are named and refused, from configs and headers alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.errors import ModelError
from lora_rocm.families.sdxl.family import Sdxl
from tests.tiny_models import (
    SHALLOW_WIDER,
    read_json,
    tiny_pipeline,
    tiny_recipe,
    write_config_folder,
    write_single_file,
    write_tiny_sdxl,
)
from tests.wording import Worded, holds, says, worded


def refusal(path: Path, **model: Any) -> str:
    """The text of the refusal; loading anything would fail the test by itself, since the files are too small."""
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
    return write_tiny_sdxl(tmp_path / "m", **SHALLOW_WIDER)


@pytest.mark.parametrize(("kind", "extra", "words"), [
    ("StableDiffusionPipeline", {}, "Stable Diffusion 1.x or 2.x"),
    ("StableDiffusion3Pipeline", {"transformer": ["diffusers", "SD3Transformer2DModel"]}, "Stable Diffusion 3"),
    ("FluxPipeline", {"transformer": ["diffusers", "FluxTransformer2DModel"]}, "FLUX"),
    ("QwenImagePipeline", {"transformer": ["diffusers", "X"]}, "Qwen-Image"),
    ("SomeNewPipeline", {"transformer": ["diffusers", "X"]}, "SomeNewPipeline"),
    ("StableDiffusionXLImg2ImgPipeline", {"text_encoder": [None, None]}, "refiner"),
])  # fmt: skip
def test_other_pipelines(folder: Path, kind: str, extra: dict[str, Any], words: str) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name=kind, **extra))
    assert words in refusal(folder)


@pytest.mark.parametrize(("changes", "words"), [
    ({"addition_embed_type": None}, worded("families/text-and-time-conditioning")),
    ({"in_channels": 8}, worded("families/8-channels")),
])  # fmt: skip
def test_other_unets(folder: Path, changes: dict[str, Any], words: Worded) -> None:
    edit(folder / "unet" / "config.json", lambda config: config.update(changes))
    assert says(refusal(folder), words)


def test_a_model_without_a_component(folder: Path) -> None:
    (folder / "vae").rename(folder / "elsewhere")
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(folder)).source
    assert caught.value.code == "incomplete-model"
    assert "vae" in caught.value.what


DIT = "model.diffusion_model."


@pytest.mark.parametrize(("names", "words"), [
    (["lora_unet_input_blocks_4_1_proj_in.lora_down.weight"], "LoRA file"),
    (["unet.mid_block.attentions.0.proj_in.lora_A.weight"], "LoRA file"),
    (["lora_unet_x.hada_w1_a"], "LoHa file"),
    ([f"{DIT}double_blocks.0.img_attn.norm.key_norm.scale"], "FLUX.1"),
    (["double_blocks.0.img_attn.norm.key_norm.scale", "guidance_in.in_layer.bias"], "FLUX.1"),
    (["single_transformer_blocks.0.proj_mlp.weight", "time_text_embed.text_embedder.linear_1.bias"], "FLUX.1"),
    (["double_blocks.0.img_attn.qkv.weight", "distilled_guidance_layer.in_proj.bias"], "Chroma"),
    (["double_blocks.0.img_attn.qkv.weight", "single_stream_modulation.lin.weight"], "FLUX.2"),
    ([f"{DIT}joint_blocks.0.context_block.adaLN_modulation.1.bias"], "Stable Diffusion 3"),
    (["txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight"], "Qwen-Image"),
    (["cap_embedder.1.weight", "noise_refiner.0.attention.qkv.weight", "cap_pad_token"], "Z-Image"),
    (["head.modulation", "blocks.0.self_attn.q.weight"], "Wan"),
    (["net.blocks.0.mlp.layer1.weight", "net.llm_adapter.blocks.0.cross_attn.q_proj.weight"], "Anima"),
    ([f"{DIT}txtfusion.projector.weight"], "Krea 2"),
    (["av_ca_a2v_gate_adaln_single.linear.weight"], "LTX-2"),
    (["encoder.block.0.layer.0.SelfAttention.q.weight"], "T5"),
    (["cond_stage_model.transformer.text_model.embeddings.position_ids"], "Stable Diffusion 1.x"),
    (["cond_stage_model.model.positional_embedding"], "Stable Diffusion 2.x"),
    (["conditioner.embedders.0.model.text_projection"], "refiner"),
    (["edm_mean"], "Playground"),
    (["edm_vpred.sigma_max"], "CosXL"),
    (["model.layers.0.self_attn.q_proj.weight"], "language model"),
    (["blob"], worded("families/no-checkpoint-that-is-known")),
])  # fmt: skip
def test_other_files(tmp_path: Path, names: list[str], words: str | Worded) -> None:
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "x.safetensors")
    assert holds(refusal(tmp_path / "x.safetensors"), words)


@pytest.mark.parametrize(("width", "words"), [(768, "1.x UNet"), (1024, "2.x UNet"), (2048, "UNet alone")])
def test_a_unet_alone_is_named_by_the_width_of_its_text(tmp_path: Path, width: int, words: str) -> None:
    name = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    save_file({name: torch.zeros(4, width)}, tmp_path / "x.safetensors")
    assert holds(refusal(tmp_path / "x.safetensors"), words)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(one-file checkpoint, folder with its configs and tokenizers), which no test changes."""
    folder, pipeline = tmp_path_factory.mktemp("written"), tiny_pipeline()
    return write_single_file(pipeline, folder / "x.safetensors"), write_config_folder(pipeline, folder / "config")


def checkpoint(
    written: tuple[Path, Path], tmp_path: Path, keep: Callable[[str], bool], **extra: torch.Tensor
) -> tuple[Path, Path]:
    """(file of the tensors kept, the folder with its configs)."""
    file, config = written
    tensors = {name: tensor for name, tensor in load_file(file).items() if keep(name)}
    save_file({**tensors, **extra}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors", config


def test_a_checkpoint_with_more_input_than_inpainting_takes(written: tuple[Path, Path], tmp_path: Path) -> None:
    weight = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(16, 8, 3, 3)}
    assert says(refusal(checkpoint(written, tmp_path, lambda name: True, **weight)[0]), "families/8-channels")


@pytest.mark.parametrize(("lost", "words"), [
    ("conditioner.", "text encoders"),
    ("first_stage_model.", "VAE"),
    ("model.diffusion_model.", "UNet"),
])  # fmt: skip
def test_an_incomplete_checkpoint(written: tuple[Path, Path], tmp_path: Path, lost: str, words: str) -> None:
    file, config = checkpoint(written, tmp_path, lambda name: not name.startswith(lost))
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(file, model={"config": str(config)})).source
    assert caught.value.code == "incomplete-model"
    assert words in caught.value.what


def test_a_checkpoint_without_vae_is_whole_with_another(
    written: tuple[Path, Path], tmp_path: Path, folder: Path
) -> None:
    file, config = checkpoint(written, tmp_path, lambda name: not name.startswith("first_stage_model."))
    recipe = tiny_recipe(file, model={"config": str(config), "vae": str(folder / "vae")})
    assert Sdxl(recipe).source.load("vae", torch.float32, torch.device("cpu"))


def refused(path: Path, **sections: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(path, **sections)).source
    assert caught.value.fix and caught.value.where
    return caught.value


@pytest.mark.parametrize("word", ["flow_prediction", "sample", "__import__", 7, None, ["epsilon"], "\x1b[31m"])
def test_a_target_that_is_not_known_is_refused_by_name(folder: Path, word: object) -> None:
    edit(folder / "scheduler" / "scheduler_config.json", lambda config: config.update(prediction_type=word))
    error = refused(folder)
    assert error.code == "prediction-unknown"
    assert "scheduler_config.json" in error.where and "\x1b" not in str(error)
    assert str(word).strip("\x1b") in error.what
    chosen = Sdxl(tiny_recipe(folder, model={"prediction_type": "v_prediction"}))
    assert chosen.objective.schedule.prediction_type == "v_prediction"  # the user may state it


@pytest.mark.parametrize("changes", [
    {"beta_schedule": "cosine of my own"},
    {"num_train_timesteps": 10**7},
    {"num_train_timesteps": 0},
    {"num_train_timesteps": "1000"},
    {"beta_end": -3.0},
    {"beta_start": "x"},
    {"trained_betas": ["x"]},
    {"timestep_spacing": "sideways"},
])  # fmt: skip
def test_a_noise_schedule_that_is_none(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "scheduler" / "scheduler_config.json", lambda config: config.update(changes))
    assert refused(folder).code == "scheduler-unreadable"


def test_a_schedule_of_no_numbers(folder: Path) -> None:
    edit(folder / "scheduler" / "scheduler_config.json", lambda config: config.update(trained_betas=[float("nan")] * 9))
    error = refused(folder)
    assert error.code == "config-unreadable" and error.where.endswith(": trained_betas")


@pytest.mark.parametrize(("component", "changes"), [
    ("unet", {"transformer_layers_per_block": [1, 1, 10_000]}),
    ("unet", {"layers_per_block": 10_000}),
    ("unet", {"reverse_transformer_layers_per_block": [[10**9] * 3]}),
    ("unet", {"cross_attention_dim": 2**60}),
    ("vae", {"block_out_channels": [8] * 5000, "down_block_types": ["DownEncoderBlock2D"] * 5000}),
    ("text_encoder", {"num_hidden_layers": 10_000}),
    ("text_encoder_2", {"max_position_embeddings": 10**12}),
    ("text_encoder_2", {"vocab_size": 1e300}),
])  # fmt: skip
def test_a_config_of_absurd_size_is_refused_at_once(folder: Path, component: str, changes: dict[str, Any]) -> None:
    edit(folder / component / "config.json", lambda config: config.update(changes))
    begun = time.process_time()
    error = refused(folder)
    assert error.code == "config-absurd" and component in error.where
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(("component", "changes"), [
    ("text_encoder", {"hidden_size": "x"}),
    ("text_encoder", {"num_attention_heads": 7}),
    ("text_encoder_2", {"hidden_act": "mine"}),
    ("text_encoder_2", {"dtype": "floaty"}),
    ("unet", {"down_block_types": ["Mine"]}),
    ("unet", {"norm_num_groups": 0}),
    ("vae", {"block_out_channels": "x"}),
])  # fmt: skip
def test_a_config_from_which_nothing_can_be_made(folder: Path, component: str, changes: dict[str, Any]) -> None:
    edit(folder / component / "config.json", lambda config: config.update(changes))
    error = refused(folder)
    assert error.code == "config-unfit" and component in error.where and component in error.what


def test_a_config_chooses_no_code(folder: Path) -> None:
    path = folder / "text_encoder" / "config.json"
    edit(path, lambda config: config.update(_attn_implementation="someone/kernels", attn_implementation="a/b"))
    encoder: Any = Sdxl(tiny_recipe(folder)).source.load("text_encoder", torch.float32, torch.device("cpu"))
    assert encoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", [
    "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k_ip.weight",
    "model.diffusion_model.made_up.weight",
    "first_stage_model.decoder.made_up",
    "conditioner.embedders.0.transformer.text_model.made_up.weight",
    "conditioner.embedders.1.model.made_up",
])  # fmt: skip
def test_a_tensor_that_the_config_does_not_know_is_refused(single: tuple[Path, Path], name: str) -> None:
    save_file({**load_file(single[0]), name: torch.ones(3)}, single[0])
    error = refused(single[0], model={"config": str(single[1])})
    assert error.code == "weights-unknown" and name in error.what


def test_a_tensor_that_a_folder_s_config_does_not_know(folder: Path) -> None:
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(path), "extra.weight": torch.ones(3)}, path, {"format": "pt"})
    assert refused(folder).code == "weights-unknown"


HARMLESS = (
    "conditioner.embedders.0.transformer.text_model.embeddings.position_ids",
    "conditioner.embedders.0.transformer.text_projection.weight",
    "conditioner.embedders.1.model.logit_scale",
    "first_stage_model.loss.logvar",
    "model_ema.decay",
    "denoiser.sigmas",
    "v_pred",
    "ztsnr",
)


@pytest.mark.parametrize(("names", "said"), [
    (HARMLESS, []),
    ((*HARMLESS, "lost.a", "lost.b"), ["The base has tensors that are not used (2): lost.a, lost.b."]),
])  # fmt: skip
def test_what_comes_along_is_known_or_named_once(
    single: tuple[Path, Path], names: tuple[str, ...], said: list[str]
) -> None:
    save_file({**load_file(single[0]), **{name: torch.zeros(1) for name in names}}, single[0])
    family = Sdxl(tiny_recipe(single[0], model={"config": str(single[1])}))
    assert list(family.notices) == said
    assert family.load(torch.float32, torch.device("cpu"))


@pytest.fixture
def single(written: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """(a copy of the one-file checkpoint, folder with its configs and tokenizers)."""
    return Path(shutil.copy(written[0], tmp_path)), written[1]


@pytest.mark.parametrize("damage", [
    {"model": {"type": "Unheard"}}, {"version": "9.0"}, {"added_tokens": 3}, {"model": None}, {"normalizer": [1]},
])  # fmt: skip
def test_a_tokenizer_that_its_library_refuses(folder: Path, damage: dict[str, Any]) -> None:
    edit(folder / "tokenizer_2" / "tokenizer.json", lambda config: config.update(damage))
    with pytest.raises(ModelError) as caught:
        Sdxl(tiny_recipe(folder)).token_limits()
    assert caught.value.code == "tokenizer-unreadable" and "tokenizer_2" in caught.value.where
