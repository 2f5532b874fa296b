"""musubi-tuner: command lines, options in TOML, and dataset files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import ImportedRecipe, import_files
from tests.importing.imported import CONFIGS, check_outcomes, imported, outcome_of, row_of, values_of

FOLDER = CONFIGS / "musubi"
DATA = "[general]\nresolution = 768\ncaption_extension = '.txt'\n[[datasets]]\nimage_directory = '/a'\n"


def of_options(folder: Path, text: str = "", data: str = DATA) -> ImportedRecipe:
    """The recipe of options in TOML for Z-Image."""
    options = (
        f'dit = "zimage.safetensors"\nnetwork_module = "networks.lora_zimage"\ndataset_config = "data.toml"\n{text}'
    )
    return imported(folder, train_toml=options, data_toml=data)


@pytest.mark.parametrize("name", ["zimage.sh", "kontext.sh", "kontext-data.toml"])
def test_each_setting_of_the_examples_has_one_outcome(name: str) -> None:
    check_outcomes([FOLDER / name])


def test_command_line_for_z_image() -> None:
    found = import_files([FOLDER / "zimage.sh"])
    assert values_of(found) == {
        "model.family": "z-image",
        "model.name_or_path": "path/to/dit_model",
        "model.text_encoder": "path/to/text_encoder",
        "model.vae": "path/to/vae_model",
        "data.path": "/path/to/image_dir",
        "data.resolution": 723,
        "data.repeats": 1,
        "data.caption_extension": ".txt",
        "data.caption_fallback": "error",
        "data.recursive": False,
        "data.enable_bucket": True,
        "data.upscale": True,
        "lora.rank": 32,
        "lora.alpha": 1,
        "lora.targets": "attention-mlp",
        "optim.optimizer": "adamw_8bit",
        "optim.learning_rate": 1e-4,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": 2,
        "train.epochs": 16,
        "train.batch_size": 1,
        "train.seed": 42,
        "train.mixed_precision": "bf16",
        "output.name": "name-of-lora",
        "output.dir": "path/to/output_dir",
        "output.save_every_n_epochs": 1,
        "output.dtype": "fp32",
    }
    assert not found.loses_something


def test_command_line_for_kontext_with_two_data_sets() -> None:
    found = import_files([FOLDER / "kontext.sh"])
    assert values_of(found) == {
        "model.family": "flux",
        "model.name_or_path": "path/to/dit_model",
        "model.variant": "kontext",
        "model.text_encoder": "path/to/text_encoder2",
        "model.text_encoder_2": "path/to/text_encoder1",
        "model.vae": "path/to/ae_model",
        "data.sources[0].path": "D:/edits/after",
        "data.sources[0].control_path": "D:/edits/before",
        "data.sources[0].resolution": 1024,
        "data.sources[1].path": "/data/small",
        "data.sources[1].control_path": "/data/small_control",
        "data.sources[1].resolution": 512,
        "data.sources[1].repeats": 3,
        "data.sources[1].max_batch_size": 1,
        "data.caption_extension": ".caption",
        "data.caption_fallback": "error",
        "data.recursive": False,
        "data.enable_bucket": False,
        "data.upscale": True,
        "lora.rank": 32,
        "lora.alpha": 1,
        "lora.targets": "attention-mlp",
        "optim.optimizer": "adamw_8bit",
        "optim.learning_rate": 1e-4,
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": "resolution",
        "train.epochs": 16,
        "train.batch_size": 2,
        "train.seed": 42,
        "train.mixed_precision": "bf16",
        "output.name": "name-of-lora",
        "output.dir": "path/to/output_dir",
        "output.save_every_n_epochs": 1,
        "output.dtype": "fp32",
    }
    assert outcome_of(found, "datasets[0].no_resize_control") == "unsupported"


def test_absent_options_have_its_defaults(tmp_path: Path) -> None:
    values = values_of(of_options(tmp_path))
    expected = {
        "lora.rank": 4,
        "lora.alpha": 1,
        "optim.learning_rate": 2e-6,
        "train.max_train_steps": 1600,
        "train.mixed_precision": "no",
        "train.batch_size": 1,
        "data.enable_bucket": False,
        "data.upscale": True,
        "output.dtype": "fp32",
        "objective.timestep_sampling": "uniform",
        "objective.shift": 1,
    }
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("module", "script"),
    [
        ("networks.lora_qwen_image", ""),
        ("networks.lora_wan", ""),
        ("networks.lora", ""),
        ("", "flux_2"),
        ("", "hv_1_5"),
    ],
)
def test_other_bases_are_refused(module: str, script: str, tmp_path: Path) -> None:
    command = f"python {script or 'zimage'}_train_network.py --dit a --network_dim 8"
    text = f"{command} --network_module {module}" if module else command
    with pytest.raises(UserError) as error:
        imported(tmp_path, train_sh=text)
    assert error.value.code == "import-family"


@pytest.mark.parametrize(
    ("line", "key", "ours"),
    [
        ('timestep_sampling = "sigmoid"\nsigmoid_scale = 1.5', "objective.logit_std", 1.5),
        ('timestep_sampling = "logsnr"\nlogit_mean = -6.0\nlogit_std = 2.0', "objective.logit_mean", 3.0),
        ('weighting_scheme = "logit_normal"\nlogit_mean = 0.5', "objective.logit_mean", -0.5),
        ("discrete_flow_shift = 3.0", "objective.shift", 3),
        ("min_timestep = 200", "objective.min_timestep", 200),
        ("fp8_base = true\nfp8_scaled = true", "model.quantization", "fp8"),
        ("fp8_llm = true", "model.text_encoder_quantization", "fp8"),
        ("base_weights = ['adapter.safetensors']", "model.training_adapter", "adapter.safetensors"),
        ("network_args = ['loraplus_lr_ratio=4']", "lora.loraplus_lr_ratio", 4),
        ("lr_warmup_steps = 0.1\nlr_scheduler = 'cosine'", "optim.lr_warmup_steps", 160),
        ("lr_warmup_steps = 0.1\nmax_train_epochs = 2", "optim.lr_warmup_ratio", 0.1),
        ("lr_scheduler = 'polynomial'\nlearning_rate = 1e-4", "optim.lr_min_ratio", 0.001),
        ("optimizer_type = 'adafactor'", "optim.relative_step", True),
        ("scale_weight_norms = 1.0", "lora.scale_weight_norms", 1),
        ("log_with = 'wandb'\nlog_tracker_name = 'p'", "output.log_project", "p"),
        ("[section]\nseed = 7", "train.seed", 7),
    ],
)
def test_option_becomes_key(line: str, key: str, ours: object, tmp_path: Path) -> None:
    assert values_of(of_options(tmp_path, line))[key] == ours


def test_rank_from_a_file(tmp_path: Path) -> None:
    weights = tmp_path / "a.safetensors"
    save_file({"lora_unet_layers_0_attention_to_q.lora_down.weight": np.zeros((3, 8), np.float32)}, weights)
    found = of_options(tmp_path, f"network_weights = '{weights}'\ndim_from_weights = true")
    assert outcome_of(found, "dim_from_weights") == "taken"
    assert values_of(found)["lora.rank"] == "auto"


def test_network_of_lycoris(tmp_path: Path) -> None:
    command = "python zimage_train_network.py --dit a --network_module networks.lokr --network_args factor=8"
    values = values_of(imported(tmp_path, train_sh=command))
    assert (values["lora.type"], values["lora.factor"]) == ("lokr", 8)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("weighting_scheme = 'cosmap'", "weighting_scheme"),
        ("timestep_sampling = 'qinglong_flux'", "timestep_sampling"),
        ("preserve_distribution_shape = true", "preserve_distribution_shape"),
        ("lr_decay_steps = 0.2", "lr_decay_steps"),
        ("network_weights = 'missing.safetensors'\ndim_from_weights = true", "dim_from_weights"),
        ("no_such_option = 1", "no_such_option"),
    ],
)
def test_lost_option(line: str, key: str, tmp_path: Path) -> None:
    row = row_of(of_options(tmp_path, line), key)
    assert (row.outcome, row.changes_weights) == ("unsupported", True)


@pytest.mark.parametrize("key", ["image_jsonl_file", "video_directory"])
def test_lists_of_files_and_videos_are_lost(key: str, tmp_path: Path) -> None:
    found = of_options(tmp_path, data=f"[[datasets]]\n{key} = '/a'\n")
    assert outcome_of(found, f"datasets[0].{key}") == "unsupported"


def test_script_for_the_whole_model_trains_an_adapter(tmp_path: Path) -> None:
    found = imported(tmp_path, train_sh="python zimage_train.py --dit zimage.safetensors --max_train_epochs 2")
    assert outcome_of(found, "script") == "unsupported"
    assert values_of(found)["model.family"] == "z-image"


def test_batch_file_with_an_unset_variable(tmp_path: Path) -> None:
    command = (
        "accelerate launch ^\n  src\\musubi_tuner\\zimage_train_network.py ^\n --dit C:\\models\\z.safetensors ^\n"
    )
    found = imported(tmp_path, train_bat=f"{command} --network_dim %RANK% --huggingface_token hf_{'a' * 30}")
    assert values_of(found)["model.name_or_path"] == "C:/models/z.safetensors"
    assert [part.line for part in found.unread] == [4]
    assert "hf_aaa" not in found.text and all("hf_aaa" not in row.setting.shown for row in found.outcomes)


def test_dataset_file_beside_the_command(tmp_path: Path) -> None:
    for name in ("zimage.sh", "zimage-data.toml"):
        shutil.copy(FOLDER / name, tmp_path)
    assert not import_files([tmp_path / "zimage.sh"]).unread
    (tmp_path / "zimage-data.toml").write_text(json.dumps({"a": 1}), encoding="utf-8")
    assert import_files([tmp_path / "zimage.sh"]).unread
