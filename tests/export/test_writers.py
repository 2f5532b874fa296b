"""Exported files, in the hands of their readers: the same keys, the same alphas, the same images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lora_rocm.errors import StorageError
from lora_rocm.export import writers
from lora_rocm.export.comfyui_check import apply_comfy
from lora_rocm.export.metadata import RunFacts, ss_fields
from tests.lora_files import write_as_forecast
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW_RISING, caption_encoder, trained, unet_output, write_tiny_sdxl

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

FACTS = RunFacts(
    steps=7,
    epochs=2,
    num_epochs=3,
    num_images=20,
    tag_frequency={"10_zibu": {"zibu": 12, "a red cat": 3}},
    buckets={"64x48": 12, "64x64": 8},
    dataset_dirs={"10_zibu": {"n_repeats": 10, "img_count": 2}},
    base_name="tiny",
)
CONV_TARGETS = r"(down_blocks|mid_block)\..*(\.to_q|net\.0\.proj|resnets\.0\.conv(1|_shortcut)|samplers\.0\.conv)"
KINDS: dict[str, dict[str, Any]] = {
    "alpha is not rank": {"rank": 4, "alpha": 2.0},
    "rslora": {"rank": 4, "alpha": 2.0, "use_rslora": True, "targets": MIDDLE_TARGETS},
    "dora": {"rank": 4, "alpha": 2.0, "use_dora": True, "targets": MIDDLE_TARGETS},
    "conv dora rslora": {
        "rank": 4,
        "alpha": 2.0,
        "use_dora": True,
        "use_rslora": True,
        "targets": CONV_TARGETS,
    },
    "text": {"rank": 4, "alpha": 2.0, "train_text_encoder": True, "targets": MIDDLE_TARGETS},
    "text dora": {
        "rank": 4,
        "alpha": 2.0,
        "train_text_encoder": True,
        "use_dora": True,
        "targets": MIDDLE_TARGETS,
    },
    "conv": {"rank": 4, "alpha": 3.0, "targets": CONV_TARGETS},
}
SLOW_KINDS = ("dora", "rslora", "text dora")
"""Their features are covered by other kinds too."""
CASES = [
    *((kind, "fp32") for kind in KINDS if kind not in SLOW_KINDS),
    *(pytest.param(kind, "fp32", marks=pytest.mark.slow) for kind in SLOW_KINDS),
    ("alpha is not rank", "bf16"),
    pytest.param("alpha is not rank", "fp16", marks=pytest.mark.slow),
    *(pytest.param("conv dora rslora", dtype, marks=pytest.mark.slow) for dtype in ("fp16", "bf16")),
]
TOLERANCE = {"fp32": 1e-4, "fp16": 3e-3, "bf16": 3e-2}  # of the LoRA's effect on the output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_RISING)
    adapted.cache_clear()
    base_outputs.cache_clear()


def pipeline_of(folder: Path) -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True, add_watermarker=False)


def outputs(text_encoders: list[torch.nn.Module], unet: torch.nn.Module, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """(prompt embeddings, UNet output on them), by the models' own forward passes."""
    ids = tokenizer(["a red cat", "dog"], padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        made = [encoder(ids, output_hidden_states=True) for encoder in text_encoders]
        prompt = torch.cat([output.hidden_states[-2] for output in made], dim=-1)
        return prompt, unet_output(unet, prompt, made[1].text_embeds)


def live_outputs(folder: Path, model: Any) -> tuple[Tensor, Tensor]:
    pipeline = pipeline_of(folder)
    encoders = [model.components.get(name, getattr(pipeline, name)) for name in ("text_encoder", "text_encoder_2")]
    return outputs(encoders, model.components["unet"], pipeline.tokenizer)


@cache
def base_outputs(folder: Path) -> tuple[Tensor, Tensor]:
    """Of the model without a LoRA."""
    pipeline = pipeline_of(folder)
    return outputs([pipeline.text_encoder, pipeline.text_encoder_2], pipeline.unet, pipeline.tokenizer)


@cache
def adapted(folder: Path, kind: str) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """(family, adapter, what the live model makes), shared between the tests: no reader gets hold of this model."""
    family, model, adapter = trained(folder, lora=KINDS[kind])
    return family, adapter, live_outputs(folder, model)


def write(form: str, path: Path, family: Any, adapter: Any, dtype: str) -> None:
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": dtype})})
    write_as_forecast(form, path, family, adapter, recipe, FACTS)


def assert_same_effect(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], base: tuple[Tensor, ...], dtype: str
) -> None:
    assert (ours[1] - base[1]).norm() > 0.02 * base[1].norm()  # else the comparison proves nothing
    for live, loaded, plain in zip(ours, theirs, base, strict=True):
        assert (live - loaded).norm() <= TOLERANCE[dtype] * (live - plain).norm() + 1e-5 * plain.norm()


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_diffusers_draws_the_same(folder: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    """The whole model both ways, with the file loaded by load_lora_weights."""
    family, adapter, ours = adapted(folder, kind)
    for form in ("kohya", "diffusers"):
        if form == "kohya" and "dora" in kind:
            continue  # diffusers drops the magnitudes; see test_kohya_dora_by_comfyui_s_rules
        path = tmp_path / form / "lora.safetensors"
        write(form, path, family, adapter, dtype)
        pipeline = pipeline_of(folder)
        pipeline.load_lora_weights(str(path))
        theirs = outputs([pipeline.text_encoder, pipeline.text_encoder_2], pipeline.unet, pipeline.tokenizer)
        assert_same_effect(ours, theirs, base_outputs(folder), dtype)


def test_images_by_diffusers_are_those_of_the_live_model(folder: Path, tmp_path: Path) -> None:
    import numpy as np

    from lora_rocm.families.base import PreviewRequest

    family, model, adapter = trained(folder, output={"dtype": "fp32"})
    request = PreviewRequest("a red cat", "", 64, 64, 3, 4.0, 7)
    encode = caption_encoder(family)
    writers.write("kohya", tmp_path / "lora.safetensors", family, adapter, family.recipe, FACTS)
    pipeline = pipeline_of(folder)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"))
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        (ours,) = family.preview(model, [request], encode)
        theirs = pipeline(
            "a red cat",
            negative_prompt="",
            height=64,
            width=64,
            num_inference_steps=3,
            guidance_scale=4.0,
            generator=torch.Generator().manual_seed(7),
        ).images[0]
    assert np.abs(np.asarray(ours).astype(int) - np.asarray(theirs).astype(int)).max() <= 1


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_peft_draws_the_same(folder: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    family, adapter, ours = adapted(folder, kind)
    write("peft", tmp_path / "peft", family, adapter, dtype)
    pipeline = pipeline_of(folder)
    parts = {name: getattr(pipeline, name) for name in ("text_encoder", "text_encoder_2", "unet")}
    for name in adapter.components:
        parts[name] = PeftModel.from_pretrained(parts[name], str(tmp_path / "peft" / name)).get_base_model()
    theirs = outputs([parts["text_encoder"], parts["text_encoder_2"]], parts["unet"], pipeline.tokenizer)
    assert_same_effect(ours, theirs, base_outputs(folder), dtype)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_kohya_dora_by_comfyui_s_rules(folder: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    """Weights patched by an independent reader, in a model without any adapter."""
    family, adapter, ours = adapted(folder, kind)
    write("kohya", tmp_path / "lora.safetensors", family, adapter, dtype)
    pipeline = pipeline_of(folder)
    parts = {name: getattr(pipeline, name) for name in ("text_encoder", "text_encoder_2", "unet")}
    layers = {
        family.lora_file_names.key(component, path): parts[component].get_submodule(path)
        for component, path, _ in adapter.modules.values()
    }
    weights = {key: layer.weight.detach().clone() for key, layer in layers.items()}
    for key, patched in apply_comfy(load_file(tmp_path / "lora.safetensors"), weights):
        layers[key].weight.data = patched
    theirs = outputs([parts["text_encoder"], parts["text_encoder_2"]], parts["unet"], pipeline.tokenizer)
    assert_same_effect(ours, theirs, base_outputs(folder), dtype)


def test_the_tensors_of_a_kohya_file(folder: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 2.0, "use_rslora": True, "use_dora": True, "targets": "attention-mlp-conv"}
    family, _, adapter = trained(folder, lora=lora, output={"dtype": "fp16"})
    writers.write("kohya", tmp_path / "lora.safetensors", family, adapter, family.recipe, FACTS)
    tensors = load_file(tmp_path / "lora.safetensors")
    assert len(tensors) == 4 * len(adapter.modules)
    for component, path, layer in adapter.modules.values():
        key, base = family.lora_file_names.key(component, path), layer.get_base_layer().weight
        down, up = tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"]
        assert down.shape == (4, *base.shape[1:])
        assert up.shape == (base.shape[0], 4, *[1] * (base.ndim - 2))
        assert down.dtype == up.dtype == torch.float16
        assert tensors[f"{key}.alpha"].shape == ()
        assert tensors[f"{key}.alpha"].item() == 4.0  # 2 * sqrt(4)
        assert tensors[f"{key}.dora_scale"].shape == (base.shape[0], *[1] * (base.ndim - 1))
        assert tensors[f"{key}.dora_scale"].dtype == torch.float32


def test_the_config_in_a_diffusers_file_is_peft_s(folder: Path, tmp_path: Path) -> None:
    family, _, adapter = trained(folder, lora={"rank": 4, "alpha": 2.5, "use_rslora": True, "train_text_encoder": True})
    writers.write("diffusers", tmp_path / "x.safetensors", family, adapter, family.recipe, FACTS)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        metadata, names = file.metadata(), list(file.keys())
    configs = json.loads(metadata["lora_adapter_metadata"])
    assert {key.split(".")[0] for key in configs} == {"unet", "text_encoder", "text_encoder_2"}
    for component in ("unet", "text_encoder"):
        config = LoraConfig(**{k.split(".", 1)[1]: v for k, v in configs.items() if k.startswith(component + ".")})
        assert (config.r, config.lora_alpha, config.use_rslora, config.use_dora) == (4, 2.5, True, False)
    assert metadata["format"] == "pt"
    assert all(".text_model." in name for name in names if name.startswith("text_encoder"))


def test_metadata(folder: Path, tmp_path: Path) -> None:
    output = {"name": "My LoRA ä", "author": "me", "license": "CC0", "description": "d"}
    family, _, adapter = trained(
        folder,
        lora={"rank": 4, "alpha": 2.0, "use_rslora": True},
        output=output,
        objective={"min_snr_gamma": 5.0, "loss_type": "huber", "huber_c": 0.2, "debiased_estimation_loss": True},
        data={"trigger_word": "zibu"},
    )
    writers.write("kohya", tmp_path / "x.safetensors", family, adapter, family.recipe, FACTS)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {
        "ss_v2": "False",
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "4",  # the file's, with which alpha / rank is the trained scale
        "ss_network_args": "{}",
        "ss_output_name": "My LoRA ä",
        "ss_training_comment": "d",
        "ss_steps": "7",
        "ss_epoch": "2",
        "ss_num_epochs": "3",
        "ss_num_train_images": "20",
        "ss_min_snr_gamma": "5.0",
        "ss_loss_type": "huber",
        "ss_huber_schedule": "snr",
        "ss_huber_c": "0.2",
        "ss_debiased_estimation": "True",
        "ss_seed": "0",
        "ss_sd_model_name": "tiny",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": "My LoRA ä",
        "modelspec.resolution": "64x64",
        "modelspec.author": "me",
        "modelspec.license": "CC0",
        "modelspec.description": "d",
        "modelspec.trigger_phrase": "zibu",
        "modelspec.prediction_type": "epsilon",
    }
    assert {name: metadata.get(name) for name in expected} == expected
    assert json.loads(metadata["ss_tag_frequency"]) == FACTS.tag_frequency
    assert json.loads(metadata["ss_dataset_dirs"]) == FACTS.dataset_dirs
    buckets = json.loads(metadata["ss_bucket_info"])["buckets"]
    assert buckets == {"0": {"resolution": [64, 48], "count": 12}, "1": {"resolution": [64, 64], "count": 8}}
    assert not [name for name in metadata if "date" in name or "time" in name or "started" in name]


def test_regularisation_images_are_counted_apart(folder: Path) -> None:
    """kohya-ss/sd-scripts train_network.py: ss_num_reg_images and ss_reg_dataset_dirs."""
    family, _, _ = trained(folder)
    own, reg = {"n_repeats": 4, "img_count": 3}, {"n_repeats": 1, "img_count": 5, "num_reg": 8}
    facts = replace(FACTS, num_images=20, dataset_dirs={"anna": own, "woman": reg})
    found = ss_fields(family.recipe, family, facts, {})
    assert (found["ss_num_train_images"], found["ss_num_reg_images"]) == ("12", "8")
    assert json.loads(found["ss_dataset_dirs"]) == {"anna": own}
    assert json.loads(found["ss_reg_dataset_dirs"]) == {"woman": reg} and found["ss_prior_loss_weight"] == "1.0"
    plain = ss_fields(family.recipe, family, FACTS, {})
    assert plain["ss_num_reg_images"] == "0" and not {"ss_reg_dataset_dirs", "ss_prior_loss_weight"} & plain.keys()


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_the_same_adapter_gives_the_same_bytes(folder: Path, tmp_path: Path, form: str) -> None:
    def written(name: str) -> dict[str, bytes]:
        family, _, adapter = trained(folder, lora={**KINDS["text dora"]})
        writers.write(form, tmp_path / name, family, adapter, family.recipe, FACTS)
        files = [tmp_path / name] if form != "peft" else sorted((tmp_path / name).rglob("*.*"))
        return {path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in files}

    first = written("a")
    assert first == written("b")
    assert len(first) == (6 if form == "peft" else 1)


def test_a_file_is_whole_or_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, _, adapter = trained(folder)
    path = tmp_path / "lora.safetensors"
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError):
        writers.write("kohya", path, family, adapter, family.recipe, RunFacts(8, 2, 3))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["lora.safetensors"]
