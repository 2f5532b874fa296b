"""SimpleTuner: the recipe values, outcomes and defaults of its configurations, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import ImportedRecipe, import_files
from tests.importing.imported import CONFIGS, check_outcomes, imported, outcome_of, row_of, values_of

FOLDER = CONFIGS / "simpletuner"
Z_IMAGE_LAYERS = r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])"


def of_options(folder: Path, **options: Any) -> ImportedRecipe:
    """The recipe of a configuration for SDXL with these options."""
    return imported(folder, config_json=json.dumps({"model_family": "sdxl", "optimizer": "torch-adamw", **options}))


def of_data(folder: Path, **entry: Any) -> ImportedRecipe:
    """The recipe of a configuration with one data set."""
    data = [{"id": "a", "instance_data_dir": "/data/a", **entry}]
    config = json.dumps({"model_family": "flux", "model_flavour": "kontext", "data_backend_config": "data.json"})
    return imported(folder, config_json=config, data_json=json.dumps(data))


@pytest.mark.parametrize("name", ["sdxl.json", "kontext.toml", "config.env", "multidatabackend.json"])
def test_each_setting_of_the_examples_has_one_outcome(name: str) -> None:
    check_outcomes([FOLDER / name])


def test_sdxl_with_several_data_sets() -> None:
    found = import_files([FOLDER / "sdxl.json"])
    assert values_of(found) == {
        "model.family": "sdxl",
        "model.name_or_path": "C:/models/illustrious-v2.safetensors",
        "model.prediction_type": "v_prediction",
        "data.sources[0].path": "D:/data/cats",
        "data.sources[0].caption_fallback": "error",
        "data.sources[0].enable_wildcard": True,
        "data.sources[0].caption_prefix": "sks cat ",
        "data.sources[0].shuffle_caption": True,
        "data.sources[0].keep_tokens": 1,
        "data.sources[0].resolution": 1024,
        "data.sources[0].repeats": 10,
        "data.sources[1].path": "/data/dogs",
        "data.sources[1].trigger_word": "a dog",
        "data.sources[1].caption_fallback": "trigger",
        "data.sources[1].resolution": 704,
        "data.sources[1].max_batch_size": 1,
        "data.caption_dropout_rate": 0.1,
        "data.upscale": True,
        "data.caption_variants": 3,
        "lora.rank": 16,
        "lora.dropout": 0.1,
        "lora.targets": "attention",
        "lora.weight_dtype": "bf16",
        "optim.optimizer": "adamw_8bit",
        "optim.learning_rate": 8e-5,
        "optim.weight_decay": 0.05,
        "optim.lr_scheduler": "polynomial",
        "optim.lr_scheduler_power": 0.8,
        "optim.lr_min_ratio": 0.005,
        "optim.lr_warmup_steps": 100,
        "optim.lr_warmup_from_zero": True,
        "optim.max_grad_norm": 0.5,
        "optim.epsilon": 1e-6,
        "objective.min_snr_gamma": 5,
        "objective.noise_offset": 0.05,
        "objective.zero_terminal_snr": True,
        "train.max_train_steps": 3000,
        "train.batch_size": 2,
        "train.mixed_precision": "bf16",
        "train.ema_decay": 0.994987,
        "sample.every_n_steps": 200,
        "sample.prompts": ["photo of sks cat"],
        "sample.guidance_scale": 4.2,
        "sample.width": 1024,
        "sample.height": 768,
        "output.dir": "output/sdxl",
        "output.keep_last": 5,
        "output.formats": ["diffusers"],
        "output.dtype": "bf16",
        "output.log_with": ["wandb"],
        "output.log_project": "cats",
    }
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    assert lost == {
        "tread_config",
        "data_backend[0].minimum_image_size",
        "data_backend[1].probability",
        "data_backend[3].type",
    }
    assert found.loses_something


def test_kontext_with_control_images() -> None:
    found = import_files([FOLDER / "kontext.toml"])
    assert values_of(found) == {
        "model.family": "flux",
        "model.name_or_path": "black-forest-labs/FLUX.1-Kontext-dev",
        "model.quantization": "int8",
        "model.variant": "kontext",
        "model.text_encoder_quantization": "int8",
        "data.path": "~/edits/after",
        "data.resolution": 768,
        "data.caption_fallback": "error",
        "data.caption_dropout_rate": 0,
        "data.control_path": "~/edits/before",
        "data.enable_bucket": False,
        "data.upscale": True,
        "lora.rank": 32,
        "lora.alpha": 32,
        "lora.targets": "attention-mlp",
        "lora.weight_dtype": "bf16",
        "optim.optimizer": "adamw_bf16",
        "optim.rounding": "kahan",
        "optim.learning_rate": 1e-4,
        "optim.weight_decay": 0.0,
        "optim.betas": [0.9, 0.99],
        "optim.epsilon": 1e-6,
        "optim.lr_scheduler": "cosine",
        "optim.lr_cosine_steps": 500,
        "optim.lr_min_ratio": 0.004,
        "optim.max_grad_norm": 0,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": "resolution",
        "train.epochs": 12,
        "train.batch_size": 4,
        "train.seed": 42,
        "train.mixed_precision": "bf16",
        "output.save_every_n_epochs": 2,
        "output.keep_last": 5,
        "output.formats": ["diffusers"],
        "output.dtype": "bf16",
    }
    assert not found.loses_something


def test_environment_file_with_lycoris() -> None:
    found = import_files([FOLDER / "config.env"])
    assert values_of(found) == {
        "model.family": "z-image",
        "model.name_or_path": "Tongyi-MAI/Z-Image-Turbo",
        "model.training_adapter": "zimage_turbo_training_adapter_v2.safetensors",
        "model.variant": "turbo",
        "data.sources[0].dataset": "owner/images",
        "data.sources[0].image_column": "picture",
        "data.sources[0].caption_column": "caption",
        "data.resolution": 512,
        "data.caption_dropout_rate": 0.1,
        "data.upscale": True,
        "lora.type": "lokr",
        "lora.rank": 2048,
        "lora.targets": [Z_IMAGE_LAYERS],
        "lora.factor": 16,
        "optim.optimizer": "prodigy_schedule_free",
        "optim.learning_rate": 1e-5,
        "optim.weight_decay": 0.0,
        "optim.betas": [0.9, 0.99],
        "optim.max_grad_norm": 0,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": 1.5,
        "train.max_train_steps": 2000,
        "train.batch_size": 1,
        "train.mixed_precision": "bf16",
        "output.dir": "/data/output",
        "output.keep_last": 5,
        "output.dtype": "bf16",
    }
    (unread,) = found.unread
    assert (Path(unread.file).name, unread.line) == ("config.env", 14)


def test_absent_options_have_simpletuners_defaults(tmp_path: Path) -> None:
    values = values_of(imported(tmp_path, config_json='{"model_family": "sdxl", "data_backend_config": ""}'))
    defaults = {
        "model.name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
        "lora.rank": 16,
        "lora.dropout": 0.1,
        "lora.targets": "attention",
        "optim.optimizer": "adamw_bf16",
        "optim.epsilon": 1e-6,
        "optim.learning_rate": 4e-7,
        "optim.lr_scheduler": "constant",
        "optim.max_grad_norm": 0,
        "train.batch_size": 4,
        "train.epochs": 1,
        "train.mixed_precision": "bf16",
        "data.caption_dropout_rate": 0.1,
    }
    assert {key: values.get(key) for key in defaults} == defaults


def test_flow_models_are_shifted_by_default(tmp_path: Path) -> None:
    values = values_of(imported(tmp_path, config_json='{"model_family": "anima", "optimizer": "torch-adamw"}'))
    assert values["objective.shift"] == 3
    assert values["objective.timestep_sampling"] == "logit-normal"


@pytest.mark.parametrize("family", ["qwen_image", "sd3", "wan", "flux2", "no such family"])
def test_other_families_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        of_options(tmp_path, model_family=family)
    assert error.value.code == "import-family"


def test_refiner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        of_options(tmp_path, model_flavour="refiner-1.0")
    assert error.value.code == "import-family"


@pytest.mark.parametrize(
    ("option", "value", "key", "ours"),
    [
        ("optimizer", "optimi-lion", "optim.optimizer", "lion"),
        ("optimizer", "adamw_schedulefree", "optim.optimizer", "adamw_schedule_free"),
        ("optimizer", "sdnq-came", "optim.optimizer", "came"),
        ("optimizer", "muon", "optim.optimizer", "muon"),
        ("base_model_precision", "nf4-bnb", "model.quantization", "nf4"),
        ("base_model_precision", "fp8-torchao", "model.quantization", "fp8"),
        ("base_model_precision", "int4-quanto", "model.quantization", "nf4"),
        ("lora_init_type", "pissa", "lora.init", "pissa"),
        ("use_dora", "true", "lora.use_dora", True),
        ("train_text_encoder", True, "lora.train_text_encoder", True),
        ("loss_type", "smooth_l1", "objective.loss_type", "smooth_l1"),
        ("input_perturbation", 0.1, "objective.ip_noise_gamma", 0.1),
        ("num_train_epochs", 7, "train.epochs", 7),
        ("aspect_bucket_alignment", 32, "data.bucket_step", 32),
        ("lora_format", "comfyui", "output.formats", ["comfyui"]),
        ("peft_lora_target_modules", ["to_q"], "lora.targets", [r"(.*\.)?to_q"]),
        ("gradient_accumulation_steps", 2, "train.gradient_accumulation_steps", 2),
    ],
)
def test_option_becomes_key(option: str, value: object, key: str, ours: object, tmp_path: Path) -> None:
    assert values_of(of_options(tmp_path, **{option: value}))[key] == ours


@pytest.mark.parametrize(
    ("option", "value", "outcome"),
    [
        ("xm_enabled", True, "unsupported"),
        ("xm_enabled", "false", "not-needed"),
        ("controlnet", True, "unsupported"),
        ("timestep_bias_strategy", "none", "not-needed"),
        ("timestep_bias_strategy", "later", "unsupported"),
        ("lr_scheduler", "sine", "unsupported"),
        ("base_model_precision", "int2-quanto", "unsupported"),
        ("model_type", "full", "unsupported"),
        ("lycoris_config", "elsewhere.json", "not-needed"),
        ("sana_complex_human_instruction", "x", "not-needed"),
        ("no_such_option", 3, "unsupported"),
    ],
)
def test_outcome_of_an_option(option: str, value: object, outcome: str, tmp_path: Path) -> None:
    assert outcome_of(of_options(tmp_path, **{option: value}), option) == outcome


def test_small_limit_of_gradient_values_is_lost(tmp_path: Path) -> None:
    found = of_options(tmp_path, max_grad_norm=0.01)
    assert outcome_of(found, "max_grad_norm") == "unsupported"
    assert values_of(found)["optim.max_grad_norm"] == 0


def test_scaled_learning_rate(tmp_path: Path) -> None:
    options = {"learning_rate": 1e-5, "lr_scale": True, "train_batch_size": 2, "gradient_accumulation_steps": 3}
    assert values_of(of_options(tmp_path, **options))["optim.learning_rate"] == 6e-5


def test_soft_min_snr(tmp_path: Path) -> None:
    options = {"snr_gamma": 5, "use_soft_min_snr": True, "soft_min_snr_sigma_data": 0.5}
    values = values_of(of_options(tmp_path, **options))
    assert values["objective.soft_min_snr_gamma"] == 4
    assert "objective.min_snr_gamma" not in values


def test_cosine_without_steps_falls_over_a_thousand(tmp_path: Path) -> None:
    values = values_of(of_options(tmp_path, lr_scheduler="cosine", learning_rate=1e-4))
    assert values["optim.lr_cosine_steps"] == 1000
    assert "optim.lr_warmup_steps" not in values


def test_float32_adapter(tmp_path: Path) -> None:
    values = values_of(of_options(tmp_path, mixed_precision="no", optimizer="optimi-adamw"))
    assert values["optim.optimizer"] == "adamw"
    assert "lora.weight_dtype" not in values
    assert values["train.mixed_precision"] == "no"


def test_unknown_optimizer_gets_a_rate_that_fits_adamw(tmp_path: Path) -> None:
    found = of_options(tmp_path, optimizer="soap", learning_rate=0.5)
    values = values_of(found)
    assert (values["optim.optimizer"], values["optim.learning_rate"]) == ("adamw", 1e-4)
    assert outcome_of(found, "optimizer") == outcome_of(found, "learning_rate") == "unsupported"


@pytest.mark.parametrize(
    ("entry", "key", "ours"),
    [
        ({"caption_strategy": "filename"}, "data.caption_fallback", "filename"),
        ({"instance_prompt": "a", "only_instance_prompt": True}, "data.trigger_word", "a"),
        ({"crop": True, "crop_aspect": "preserve"}, "data.enable_bucket", True),
        ({"crop": True, "crop_style": "random"}, "data.random_crop", True),
        ({"repeats": 3}, "data.repeats", 4),
        ({"resolution": 1.05, "resolution_type": "area"}, "data.resolution", 1024),
        ({"resolution": 768, "resolution_type": "pixel"}, "data.resolution", 768),
    ],
)
def test_data_set(entry: dict[str, Any], key: str, ours: object, tmp_path: Path) -> None:
    assert values_of(of_data(tmp_path, **entry))[key] == ours


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"crop": True, "crop_aspect": "random"}, "crop_aspect"),
        ({"crop": True, "crop_style": "face"}, "crop_style"),
        ({"caption_strategy": "parquet"}, "caption_strategy"),
        ({"is_regularisation_data": True}, "is_regularisation_data"),
        ({"conditioning_data": "missing"}, "conditioning_data"),
        ({"dataset_type": "video"}, "dataset_type"),
        ({"start_epoch": 3}, "start_epoch"),
    ],
)
def test_lost_key_of_a_data_set(entry: dict[str, Any], key: str, tmp_path: Path) -> None:
    row = row_of(of_data(tmp_path, **entry), f"data_backend[0].{key}")
    assert (row.outcome, row.changes_weights) == ("unsupported", True)


@pytest.mark.parametrize("size", [-1, 0, "x", 1e300, True])
def test_impossible_sizes(size: object, tmp_path: Path) -> None:
    for unit in ("area", "pixel", "pixel_area", 3):
        found = of_data(tmp_path, resolution=size, resolution_type=unit)
        assert "data.resolution" not in values_of(found)


@pytest.mark.parametrize("main", ["photo of sks cat", ""])
def test_prompt_library(main: str, tmp_path: Path) -> None:
    library = {"beach": "sks cat on a beach", "snow": {"prompt": "sks cat in snow"}}
    (tmp_path / "library.json").write_text(json.dumps(library), encoding="utf-8")
    found = of_options(tmp_path, user_prompt_library="config/library.json", validation_prompt=main)
    prompts = [main, "sks cat on a beach", "sks cat in snow"]
    assert values_of(found)["sample.prompts"] == [prompt for prompt in prompts if prompt]


def test_lycoris_file_alone() -> None:
    values = values_of(import_files([FOLDER / "lycoris.json"]))
    assert (values["lora.type"], values["lora.rank"], values["lora.factor"]) == ("lokr", 2048, 16)


def test_masks(tmp_path: Path) -> None:
    data = [
        {"id": "a", "instance_data_dir": "/a", "conditioning_data": ["m"]},
        {"id": "m", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "/m"},
    ]
    config = '{"model_family": "sdxl", "data_backend_config": "data.json"}'
    values = values_of(imported(tmp_path, config_json=config, data_json=json.dumps(data)))
    assert values["data.mask_path"] == "/m"


def test_missing_data_file_is_listed(tmp_path: Path) -> None:
    found = of_options(tmp_path, data_backend_config="C:\\SimpleTuner\\config\\data.json")
    assert [part.line for part in found.unread] == [1]
    assert found.loses_something


def test_secrets_are_not_written() -> None:
    found = import_files([FOLDER / "sdxl.json"])
    texts = [found.text, *(row.setting.shown for row in found.outcomes), *(row.note for row in found.outcomes)]
    secrets = ("hf_abcdefghijklmnopqrstuvwxyz", "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY")
    assert not any(secret in text for text in texts for secret in secrets)


@pytest.mark.parametrize("text", ['{"model_family": "sdxl",\n"lora_rank": 8,\n"learning_rate"', '{"lora_rank": [}'])
def test_damaged_file_gives_what_can_be_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n"data_backend_config": "data.json",\n' + text.removeprefix("{"), encoding="utf-8")
    found = import_files([path])
    assert found.unread
    assert values_of(found)["model.family"] == "sdxl"


def test_option_of_the_command_line_counts(tmp_path: Path) -> None:
    config = '{"model_family": "sdxl", "lora_rank": 8}'
    assert values_of(imported(tmp_path, ["lora_rank=32"], config_json=config))["lora.rank"] == 32
