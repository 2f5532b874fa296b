"""diffusion-pipe: the recipe values, outcomes and defaults of its configurations, and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import ImportedRecipe, import_files
from tests.importing.imported import CONFIGS, check_outcomes, imported, outcome_of, values_of

FOLDER = CONFIGS / "diffusion-pipe"
MAIN = """
output_dir = '/runs'
dataset = 'data.toml'
epochs = 10
save_every_n_epochs = 2
{top}

[model]
type = '{kind}'
dtype = 'bfloat16'
diffusers_path = '/models/FLUX.1-dev'
{model}

[adapter]
type = 'lora'
rank = 8
{adapter}

[optimizer]
type = 'AdamW'
lr = 1e-4
{optimizer}
"""
DATA = """
resolutions = [512]
{top}

[[directory]]
path = '/data/a'
{directory}
"""


def of_keys(folder: Path, kind: str = "flux", **parts: str) -> ImportedRecipe:
    """The recipe of a configuration with further lines in some sections."""
    lines = {name: parts.get(name, "") for name in ("top", "model", "adapter", "optimizer")}
    data = DATA.format(top=parts.get("data", ""), directory=parts.get("directory", ""))
    return imported(folder, main_toml=MAIN.format(kind=kind, **lines), data_toml=data)


@pytest.mark.parametrize("name", ["z-image.toml", "kontext.toml", "sdxl.toml", "train.sh", "style-dataset.toml"])
def test_each_setting_of_the_examples_has_one_outcome(name: str) -> None:
    check_outcomes([FOLDER / name])


def test_z_image_with_two_directories() -> None:
    found = import_files([FOLDER / "z-image.toml"])
    assert values_of(found) == {
        "model.family": "z-image",
        "model.name_or_path": "/models/comfy/z_image_turbo_bf16.safetensors",
        "model.quantization": "fp8",
        "model.training_adapter": "/models/comfy/zimage_turbo_training_adapter_v1.safetensors",
        "model.vae": "/models/comfy/flux_vae.safetensors",
        "model.text_encoder": "/models/comfy/qwen_3_4b.safetensors",
        "model.variant": "turbo",
        "data.sources[0].path": "/data/images/ink",
        "data.sources[0].resolution": [512, 1024],
        "data.sources[0].repeats": 5,
        "data.sources[0].caption_fallback": "error",
        "data.sources[0].shuffle_caption": True,
        "data.sources[1].path": "/data/images/paper",
        "data.sources[1].resolution": 960,
        "data.sources[1].mask_path": "/data/images/paper_masks",
        "data.sources[1].caption_fallback": "empty",
        "data.caption_prefix": "ink style, ",
        "data.caption_dropout_rate": 0.1,
        "data.recursive": False,
        "data.bucket_max_aspect": 2.5,
        "data.enable_bucket": True,
        "data.upscale": True,
        "data.caption_variants": 8,
        "data.normalize_masked_area_loss": False,
        "data.watched.path": "/data/images/held out",
        "lora.rank": 32,
        "lora.targets": "all-linear",
        "lora.weight_dtype": "bf16",
        "optim.optimizer": "adamw_bf16",
        "optim.rounding": "kahan",
        "optim.learning_rate": 2e-5,
        "optim.weight_decay": 0.01,
        "optim.betas": [0.9, 0.99],
        "optim.epsilon": 1e-8,
        "optim.lr_warmup_steps": 50,
        "optim.max_grad_norm": 1,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": 3,
        "train.epochs": 200,
        "train.batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "train.mixed_precision": "bf16",
        "train.validation_every_n_epochs": 5,
        "output.dir": "/data/runs/zimage_style",
        "output.save_every_n_epochs": 10,
        "output.save_every_minutes": 120,
        "output.dtype": "bf16",
        "output.log_with": ["wandb"],
        "output.log_project": "styles",
    }
    assert not found.loses_something
    assert "0123456789abcdef0123456789abcdef01234567" not in found.text
    assert all("0123456789abcdef" not in row.setting.shown for row in found.outcomes)


def test_kontext_with_windows_paths() -> None:
    found = import_files([FOLDER / "kontext.toml"])
    assert values_of(found) == {
        "model.family": "flux",
        "model.name_or_path": "/models/flux1-kontext-dev.safetensors",
        "model.quantization": "fp8",
        "model.variant": "kontext",
        "model.vae": "/models/FLUX.1-dev/vae",
        "model.text_encoder": "/models/FLUX.1-dev/text_encoder",
        "model.text_encoder_2": "/models/FLUX.1-dev/text_encoder_2",
        "data.path": "/data/kontext/target",
        "data.control_path": "/data/kontext/control",
        "data.resolution": 512,
        "data.caption_fallback": "error",
        "data.recursive": False,
        "data.bucket_max_aspect": 2.0,
        "data.enable_bucket": True,
        "data.upscale": True,
        "lora.rank": 16,
        "lora.targets": "all-linear",
        "lora.weight_dtype": "bf16",
        "optim.optimizer": "prodigy",
        "optim.learning_rate": 1,
        "optim.weight_decay": 0.01,
        "optim.betas": [0.9, 0.99],
        "optim.optimizer_args": ["d_coef=2.0"],
        "optim.lr_scheduler": "linear",
        "optim.lr_warmup_steps": 10,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": "resolution",
        "train.max_train_steps": 3000,
        "train.batch_size": 4,
        "train.mixed_precision": "bf16",
        "output.dir": "D:/runs/kontext",
        "output.save_every_n_steps": 1000,
        "output.dtype": "bf16",
    }


def test_sdxl_trains_its_text_encoders() -> None:
    found = import_files([FOLDER / "sdxl.toml"])
    values = values_of(found)
    assert len(values.pop("lora.targets")) == 3
    assert values == {
        "model.family": "sdxl",
        "model.name_or_path": "~/models/noob_vpred.safetensors",
        "model.prediction_type": "v_prediction",
        "data.path": "~/data/cats",
        "data.resolution": 1024,
        "data.caption_fallback": "error",
        "data.shuffle_caption": True,
        "data.caption_variants": 4,
        "data.recursive": False,
        "data.bucket_max_aspect": 1.462,
        "data.enable_bucket": True,
        "data.upscale": True,
        "lora.rank": 32,
        "lora.train_text_encoder": True,
        "lora.weight_dtype": "bf16",
        "optim.optimizer": "adamw_bf16",
        "optim.rounding": "kahan",
        "optim.learning_rate": 4e-5,
        "optim.text_encoder_learning_rate": 2e-5,
        "optim.weight_decay": 0.01,
        "optim.betas": [0.9, 0.99],
        "objective.zero_terminal_snr": True,
        "objective.min_snr_gamma": 5,
        "train.epochs": 20,
        "train.mixed_precision": "bf16",
        "output.dir": "~/runs/sdxl",
        "output.save_every_n_epochs": 2,
        "output.dtype": "bf16",
    }
    assert found.loses_something


def test_command_line_leads_to_its_files() -> None:
    found = import_files([FOLDER / "train.sh"])
    values = values_of(found)
    assert (values["model.family"], values["data.path"]) == ("anima", "/data/tags")
    assert (values["lora.type"], values["lora.rank"], values["lora.factor"]) == ("lokr", 2048, 4)
    assert (values["optim.optimizer"], values["optim.learning_rate"]) == ("prodigy", 1.0)
    assert (values["objective.loss_type"], values["objective.huber_c"]) == ("huber", 0.2)
    assert outcome_of(found, "regenerate_cache") == "not-needed"
    assert not found.unread
    layers = r"transformer\.transformer_blocks\.\d+\.attn1\..*"
    assert (values["lora.overrides[0].match"], values["lora.overrides[0].learning_rate"]) == (layers, 1e-5)


def test_absent_keys_have_its_defaults(tmp_path: Path) -> None:
    values = values_of(of_keys(tmp_path))
    expected = {
        "data.enable_bucket": False,
        "data.caption_fallback": "error",
        "data.upscale": True,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": 1,
        "lora.weight_dtype": "bf16",
        "output.dtype": "bf16",
        "lora.targets": "all-linear",
    }
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize("kind", ["wan", "qwen_image", "flux2", "chroma", "cosmos_predict2", "hunyuan-video"])
def test_other_bases_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        of_keys(tmp_path, kind)
    assert error.value.code == "import-family"


def test_whole_model_becomes_a_lora(tmp_path: Path) -> None:
    text = MAIN.format(kind="flux", top="", model="", adapter="", optimizer="").replace("[adapter]", "[other]")
    assert values_of(imported(tmp_path, main_toml=text))["lora.type"] == "lora"


@pytest.mark.parametrize(
    ("part", "line", "key", "ours"),
    [
        ("top", "micro_batch_size_per_gpu = [[768, 4], [1024, 2]]", "train.batch_size", 2),
        ("top", "image_micro_batch_size_per_gpu = 3", "train.batch_size", 3),
        ("top", "lr_scheduler = 'cosine'", "optim.lr_min_ratio", 0.01),
        ("top", "force_constant_lr = 3e-5", "optim.learning_rate", 3e-5),
        ("top", "smooth_l1_beta = 0.1", "objective.loss_type", "smooth_l1"),
        ("top", "pseudo_huber_c = 0.5", "objective.huber_c", 0.5),
        ("top", "uncond_fraction = 0.05", "data.caption_dropout_rate", 0.05),
        ("model", "timestep_sample_method = 'uniform'", "objective.timestep_sampling", "uniform"),
        ("model", "sigmoid_scale = 1.5", "objective.logit_std", 1.5),
        ("model", "guidance = 3.5", "model.guidance", 3.5),
        ("model", "transformer_dtype = 'float8_e5m2'", "model.quantization", "fp8"),
        ("adapter", "dropout = 0.05", "lora.dropout", 0.05),
        ("adapter", "init_from_existing = 'C:\\runs\\epoch5'", "lora.init_from", "C:/runs/epoch5"),
        ("adapter", "fuse_adapters = [{path = 'a.st', weight = 1.0}]", "model.training_adapter", "a.st"),
        ("adapter", "dtype = 'float32'", "lora.weight_dtype", "fp32"),
        ("optimizer", "eps = 1e-7", "optim.epsilon", 1e-7),
        ("data", "size_buckets = [[640, 360, 1], [512, 512, 1]]", "data.resolution", [480, 512]),
        ("data", "cache_shuffle_num = 6", "data.caption_variants", 6),
        ("directory", "num_repeats = 7", "data.repeats", 7),
        ("directory", "control_path = '/c'", "model.variant", "kontext"),
    ],
)  # fmt: skip
def test_key_becomes_ours(part: str, line: str, key: str, ours: object, tmp_path: Path) -> None:
    assert values_of(of_keys(tmp_path, **{part: line}))[key] == ours


@pytest.mark.parametrize(
    ("part", "line", "key", "outcome"),
    [
        ("optimizer", "gradient_release = true", "optimizer.gradient_release", "unsupported"),
        ("optimizer", "gradient_release = false", "optimizer.gradient_release", "not-needed"),
        ("optimizer", "beta2_half_life = 1000", "optimizer.beta2_half_life", "unsupported"),
        ("adapter", "exclude_modules = ['proj_out']", "adapter.exclude_modules", "unsupported"),
        ("model", "bypass_guidance_embedding = true", "model.bypass_guidance_embedding", "unsupported"),
        ("model", "merge_adapters = ['a', 'b']", "model.merge_adapters", "unsupported"),
        ("data", "online_captions = true", "dataset.online_captions", "unsupported"),
        ("data", "frame_buckets = [1, 33]", "dataset.frame_buckets", "not-needed"),
        ("top", "blocks_to_swap = 20", "blocks_to_swap", "not-needed"),
        ("top", "eval_every_n_epochs = 1", "eval_every_n_epochs", "not-needed"),
        ("top", "no_such_key = 1", "no_such_key", "unsupported"),
    ],
)
def test_outcome_of_a_key(part: str, line: str, key: str, outcome: str, tmp_path: Path) -> None:
    assert outcome_of(of_keys(tmp_path, **{part: line}), key) == outcome


def test_a_rate_of_zero_leaves_the_text_encoders_alone(tmp_path: Path) -> None:
    rates = "checkpoint_path = 'a.safetensors'\ntext_encoder_1_lr = 0\ntext_encoder_2_lr = 0"
    values = values_of(of_keys(tmp_path, "sdxl", model=rates))
    assert "lora.train_text_encoder" not in values


def test_rate_of_the_unet_leaves_the_other_to_the_text_encoders(tmp_path: Path) -> None:
    values = values_of(of_keys(tmp_path, "sdxl", model="checkpoint_path = 'a'\nunet_lr = 5e-5"))
    assert (values["optim.learning_rate"], values["optim.text_encoder_learning_rate"]) == (5e-5, 1e-4)


def test_missing_dataset_and_damaged_lines_are_listed(tmp_path: Path) -> None:
    text = MAIN.format(kind="flux", top="gradient_clipping = ", model="", adapter="", optimizer="")
    path = tmp_path / "main.toml"
    path.write_text(text, encoding="utf-8")
    found = import_files([path])
    assert len(found.unread) == 2
    assert found.loses_something
    assert values_of(found)["lora.rank"] == 8
