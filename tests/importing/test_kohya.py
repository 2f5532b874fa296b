"""kohya's sd-scripts, its GUI and LoRA_Easy_Training_Scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import ImportedRecipe, import_files
from lora_rocm.importing.rows import MappingRow, table_of
from lora_rocm.importing.setting import Setting
from lora_rocm.importing.trainers import kohya
from tests.importing.imported import CONFIGS, imported, outcome_of, values_of

KOHYA = CONFIGS / "kohya"
XL = 'pretrained_model_name_or_path = "xl.safetensors"\nnetwork_module = "networks.lora"\n'
GUI = '"LoRA_type": "Standard", "sdxl": true, "pretrained_model_name_or_path": "x.safetensors", "train_data_dir": "s"'


def toml(folder: Path, text: str, **files: str) -> ImportedRecipe:
    return imported(folder, train_toml=XL + text, **files)


def gui(folder: Path, text: str) -> ImportedRecipe:
    return imported(folder, gui_json="{" + GUI + ", " + text + "}")


# defaults


def test_defaults_of_absent_keys_are_written_once(tmp_path: Path) -> None:
    found = toml(tmp_path, 'train_data_dir = "sets"\n')
    expected = {
        "lora.rank": 4, "lora.alpha": 1, "lora.train_text_encoder": True, "optim.learning_rate": 2e-6,
        "train.max_train_steps": 1600, "train.mixed_precision": "no", "data.caption_extension": ".caption",
        "data.enable_bucket": False, "data.upscale": True, "data.resolution": 512, "output.dtype": "fp32",
        "model.max_token_length": 75, "data.caption_fallback": "folder",
    }  # fmt: skip
    values = values_of(found)
    assert {key: values[key] for key in expected} == expected
    defaults = [row.setting.key for row in found.outcomes if row.setting.is_default]
    assert len(defaults) == len({*defaults}) and "caption_extension" in defaults


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("AdamW", {"optim.optimizer": "adamw"}),
        ("AdamW8bit", {"optim.optimizer": "adamw_8bit"}),
        ("Prodigy", {"optim.optimizer": "prodigy", "optim.weight_decay": 0.0}),
        (
            "prodigyplus.ProdigyPlusScheduleFree",
            {"optim.optimizer": "prodigy_schedule_free", "optim.weight_decay": 0.0},
        ),
        ("Lion8bit", {"optim.optimizer": "lion", "optim.weight_decay": 0.0}),
        ("pytorch_optimizer.CAME", {"optim.optimizer": "came", "optim.weight_decay": 0.0}),
        ("DAdaptAdam", {"optim.optimizer": "dadapt_adam", "optim.weight_decay": 0.0}),
        (
            "Adafactor",
            {"optim.optimizer": "adafactor", "optim.relative_step": True, "optim.scale_parameter": True},
        ),
        ("SGDNesterov", {"optim.optimizer": "adamw", "optim.learning_rate": 1e-4}),
    ],
)
def test_optimizers_have_the_defaults_of_their_libraries(
    optimizer: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    values = values_of(toml(tmp_path, f'optimizer_type = "{optimizer}"\nlearning_rate = 0.5\n'))
    assert {key: values.get(key) for key in expected} == expected
    assert ("optim.weight_decay" in values) == (
        expected.get("optim.weight_decay") is not None or optimizer == "Adafactor"
    )


def test_a_lost_optimizer_takes_its_rates_with_it(tmp_path: Path) -> None:
    found = toml(tmp_path, 'optimizer_type = "SGD"\nlearning_rate = 0.5\ntext_encoder_lr = 0.1\n')
    assert [outcome_of(found, key) for key in ("optimizer_type", "learning_rate", "text_encoder_lr")] == [
        "unsupported"
    ] * 3
    assert "optim.text_encoder_learning_rate" not in values_of(found)


# one key after another


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_train_epochs = 3\nmax_train_steps = 9", {"train.epochs": 3, "train.max_train_steps": None}),
        ("max_train_steps = 9", {"train.max_train_steps": 9}),
        ("unet_lr = 1e-3\nlearning_rate = 1e-4",
         {"optim.learning_rate": 1e-3, "optim.text_encoder_learning_rate": 1e-4}),
        ("learning_rate = 1e-4\ntext_encoder_lr = 1e-4", {"optim.text_encoder_learning_rate": None}),
        ("text_encoder_lr = [1e-5, 1e-5]", {"optim.text_encoder_learning_rate": 1e-5, "lora.overrides[0].match": None}),
        ("text_encoder_lr = 0", {"lora.train_text_encoder": None}),
        ("network_train_unet_only = true", {"lora.train_text_encoder": None}),
        ("cache_text_encoder_outputs = true", {"lora.train_text_encoder": None}),
        ("network_alpha = 0\nnetwork_dim = 8", {"lora.alpha": 8}),
        ("network_dim = 100000", {"lora.rank": 2048}),
        ("network_args = ['conv_dim=4', 'conv_alpha=2']",
         {"lora.targets": "attention-mlp-conv", "lora.conv_rank": 4, "lora.conv_alpha": 2}),
        ("network_args = ['conv_dim=4']", {"lora.conv_rank": 4, "lora.conv_alpha": 1}),
        ("network_args = ['dora_wd=True', 'rs_lora=True']", {"lora.use_dora": True, "lora.use_rslora": True}),
        ("network_args = ['loraplus_lr_ratio=4', 'loraplus_unet_lr_ratio=8']", {"lora.loraplus_lr_ratio": 8}),
        ("network_dropout = 0.1\nscale_weight_norms = 1", {"lora.dropout": 0.1, "lora.scale_weight_norms": 1}),
        ("base_weights = ['C:\\a.safetensors']", {"model.training_adapter": "C:/a.safetensors"}),
        ("network_weights = 'a.safetensors'", {"lora.init_from": "a.safetensors"}),
        ("full_bf16 = true", {"lora.weight_dtype": "bf16"}),
        ("full_bf16 = true\nmixed_precision = 'bf16'", {"output.dtype": "bf16"}),
        ("full_bf16 = true\nsave_precision = 'fp16'", {"output.dtype": "fp16"}),
        ("fp8_base = true", {"model.quantization": "fp8"}),
        ("v_parameterization = true", {"model.prediction_type": "v_prediction"}),
        ("min_timestep = 100\nmax_timestep = 1000", {"objective.min_timestep": 100, "objective.max_timestep": None}),
        ("huber_c = 0.3", {"objective.huber_c": None}),
        ("loss_type = 'smooth_l1'\nhuber_schedule = 'constant'",
         {"objective.loss_type": "smooth_l1", "objective.huber_schedule": "constant"}),
        ("multires_noise_iterations = 6\nmultires_noise_discount = 0.2",
         {"objective.multires_noise_iterations": 6, "objective.multires_noise_discount": 0.2}),
        ("multires_noise_discount = 0.2", {"objective.multires_noise_discount": None}),
        ("adaptive_noise_scale = 0.005\nnoise_offset = 0.05", {"objective.adaptive_noise_scale": 0.005}),
        ("v_pred_like_loss = 0.5\ndebiased_estimation_loss = true\nip_noise_gamma = 0.1",
         {"objective.v_pred_like_loss": 0.5, "objective.debiased_estimation_loss": True,
          "objective.ip_noise_gamma": 0.1}),
        ("lr_scheduler = 'cosine'\nlr_warmup_steps = 100",
         {"optim.lr_scheduler": "cosine", "optim.lr_warmup_steps": 100, "optim.lr_warmup_from_zero": True}),
        ("lr_scheduler = 'constant'\nlr_warmup_steps = 100", 
         {"optim.lr_warmup_steps": None, "optim.lr_warmup_from_zero": None}),
        ("lr_scheduler = 'constant_with_warmup'\nlr_warmup_steps = 0.1", {"optim.lr_warmup_steps": 160}),
        ("lr_scheduler = 'cosine'\nlr_warmup_steps = 0.129\nmax_train_steps = 100", {"optim.lr_warmup_steps": 12}),
        ("lr_scheduler = 'cosine'\nlr_warmup_steps = 0.001\nmax_train_steps = 100", {"optim.lr_warmup_ratio": None}),
        ("lr_scheduler = 'cosine'\nlr_warmup_steps = 0.129\nmax_train_epochs = 2", {"optim.lr_warmup_ratio": 0.129}),
        ("lr_scheduler = 'polynomial'\nlearning_rate = 1e-4", {"optim.lr_min_ratio": 0.001}),
        ("lr_scheduler = 'cosine_with_restarts'\nlr_scheduler_num_cycles = 3", {"optim.lr_scheduler_num_cycles": 3}),
        ("lr_scheduler = 'polynomial'\nlr_scheduler_power = 2", {"optim.lr_scheduler_power": 2}),
        ("lr_scheduler_type = 'CosineAnnealingLR'\nlr_scheduler_args = ['T_max=500', 'eta_min=0']",
         {"optim.lr_scheduler": "cosine", "optim.lr_cosine_steps": 500}),
        ("optimizer_type = 'Adafactor'\nlr_scheduler = 'adafactor:1e-3'", {"optim.relative_step": True}),
        ("save_every_n_epochs = 2\nsave_last_n_epochs = 3\nsave_last_n_epochs_state = 1",
         {"output.save_every_n_epochs": 2, "output.keep_last_loras": 3, "output.keep_last": 1}),
        ("max_train_epochs = 20\nsave_n_epoch_ratio = 5", {"output.save_every_n_epochs": 4}),
        ("save_every_n_steps = 100\nsave_last_n_steps = 300", {"output.keep_last_loras": 4}),
        ("validation_split = 0.1", {"data.validation_split": 0.1, "train.validation_every_n_epochs": 1}),
        ("validation_split = 0.1\nvalidate_every_n_steps = 50", {"train.validation_every_n_steps": 50}),
        ("log_with = 'all'\nlog_tracker_name = 'p'", {"output.log_with": ["wandb"], "output.log_project": "p"}),
        ("output_name = 'a'\nmetadata_title = 'b'\ntraining_comment = 'c'",
         {"output.name": "a", "output.description": "c"}),
        ("sample_prompts = 'a cat'\nsample_every_n_epochs = 1\nsample_every_n_steps = 5",
         {"sample.prompts": ["a cat"], "sample.every_n_epochs": 1, "sample.every_n_steps": None,
          "sample.sampler": "ddim"}),
        ("sample_every_n_epochs = 1", {"sample.every_n_epochs": None, "sample.sampler": None}),
    ],
)  # fmt: skip
def test_keys_of_the_scripts(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    values = values_of(toml(tmp_path, f"{text}\n"))
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resolution = '768,512'", {"data.resolution": 627}),
        ("enable_bucket = true", {"data.enable_bucket": True, "data.upscale": True, "data.bucket_max_aspect": 4.0}),
        ("enable_bucket = true\nbucket_no_upscale = true", {"data.upscale": False, "data.bucket_max_aspect": 100.0}),
        ("enable_bucket = true\nresolution = 1024\nmin_bucket_reso = 640\nmax_bucket_reso = 1536",
         {"data.bucket_max_aspect": 2.4}),
        ("enable_bucket = true\nbucket_reso_steps = 1", {"data.bucket_step": 8}),
        ("bucket_no_upscale = true", {"data.upscale": True}),
        ("shuffle_caption = true\nkeep_tokens = 1",
         {"data.shuffle_caption": True, "data.keep_tokens": 1, "data.caption_variants": 16}),
        ("color_aug = true\nrandom_crop = true", {"data.color_aug": 8, "data.random_crop": 8}),
        ("alpha_mask = true", {"data.alpha_mask": True, "data.normalize_masked_area_loss": False}),
        ("caption_extention = '.cap'", {"data.caption_extension": ".cap"}),
        ("in_json = 'm.json'\ndataset_repeats = 3",
         {"data.metadata_file": "m.json", "data.repeats": 3, "data.recursive": False}),
        ("reg_data_dir = '/reg'\nprior_loss_weight = 0.5",
         {"data.sources[1].path": "/reg", "data.sources[1].is_reg": True, "data.prior_loss_weight": 0.5}),
        ("prior_loss_weight = 0.5", {"data.prior_loss_weight": None}),
    ],
)  # fmt: skip
def test_data_of_the_command_line(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    values = values_of(toml(tmp_path, f'train_data_dir = "/sets"\n{text}\n'))
    assert {key: values.get(key) for key in expected} == expected


def test_the_innermost_section_of_a_dataset_counts(tmp_path: Path) -> None:
    data = (
        "[general]\nnum_repeats = 2\ncaption_extension = '.a'\n[[datasets]]\nnum_repeats = 3\n"
        "[[datasets.subsets]]\nimage_dir = 'a'\nnum_repeats = 4\n[[datasets.subsets]]\nimage_dir = 'b'\n"
    )
    found = toml(
        tmp_path, "dataset_config = 'data.toml'\ncaption_extension = '.b'\ntrain_data_dir = 'c'\n", data_toml=data
    )
    values = values_of(found)
    assert [values[f"data.sources[{index}].repeats"] for index in (0, 1)] == [4, 3]
    assert values["data.caption_extension"] == ".a" and "data.sources[2].path" not in values
    assert outcome_of(found, "general.num_repeats") == outcome_of(found, "train_data_dir") == "not-needed"


def test_options_on_the_command_line_take_precedence(tmp_path: Path) -> None:
    script = "accelerate launch sdxl_train_network.py --config_file=train --network_dim=32\n"
    found = imported(tmp_path, ["seed=5"], run_sh=script, train_toml=f"{XL}network_dim = 8\nseed = 4\n")
    values = values_of(found)
    assert values["lora.rank"] == 32 and values["train.seed"] == 5 and values["model.name_or_path"] == "xl.safetensors"


# families


@pytest.mark.parametrize(
    ("script", "text", "family"),
    [
        ("sdxl_train_network.py", "", "sdxl"),
        ("train_network.py", "", "sd15"),
        ("train_network.py", "--v2", "sd2"),
        ("flux_train_network.py", "", "flux"),
        ("./sd-scripts/anima_train_network.py", "", "anima"),
    ],
)
def test_the_script_names_the_family(script: str, text: str, family: str, tmp_path: Path) -> None:
    found = imported(tmp_path, run_sh=f"accelerate launch {script} --network_dim=4 {text}\n")
    assert values_of(found)["model.family"] == family


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("network_dim = 4", "sd15"),
        ("network_dim = 4\nresolution = 1024", "sdxl"),
        ("network_dim = 4\npretrained_model_name_or_path = 'flux1-dev.sft'", "flux"),
        ("network_dim = 4\nclip_l = 'a'\nt5xxl = 'b'", "flux"),
        ("network_dim = 4\nqwen3 = 'a'", "anima"),
        ("network_module = 'networks.lora_flux'", "flux"),
        ("network_dim = 4\nv2 = true", "sd2"),
    ],
)
def test_without_a_script_the_family_is_guessed(text: str, family: str, tmp_path: Path) -> None:
    assert values_of(imported(tmp_path, train_toml=text))["model.family"] == family


@pytest.mark.parametrize(
    "text",
    [
        "network_module = 'networks.lora_sd3'",
        "network_module = 'networks.lora_lumina'",
        "network_dim = 4\nmodel_type = 'chroma'",
        "network_dim = 4\nbyt5 = 'x'",
    ],
)
def test_other_bases_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        imported(tmp_path, train_toml=text)
    assert caught.value.code == "import-family" and "train.toml:" in caught.value.where


def test_the_defaults_of_flux(tmp_path: Path) -> None:
    found = imported(tmp_path, train_toml="network_module = 'networks.lora_flux'\nmin_timestep = 3\n")
    values = values_of(found)
    assert (values["objective.timestep_sampling"], values["objective.shift"]) == ("uniform", 3)
    assert values["model.guidance"] == 3.5 and values["lora.targets"] == "all-linear"
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    assert (
        lost == {"model_prediction_type", "network_train_unet_only"}
        and outcome_of(found, "min_timestep") == "not-needed"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timestep_sampling = 'flux_shift'", {"objective.shift": "resolution"}),
        ("timestep_sampling = 'shift'\ndiscrete_flow_shift = 2.5", {"objective.shift": 2.5}),
        ("timestep_sampling = 'sigmoid'\nsigmoid_scale = 2",
         {"objective.timestep_sampling": "logit-normal", "objective.shift": 1, "objective.logit_std": 2}),
        ("weighting_scheme = 'logit_normal'\nlogit_mean = 0.5\nlogit_std = 2",
         {"objective.timestep_sampling": "logit-normal", "objective.logit_mean": -0.5, "objective.logit_std": 2}),
        ("pretrained_model_name_or_path = 'flux1-schnell.sft'", {"model.variant": "schnell"}),
        ("fp8_base = true\nae = 'a'\nclip_l = 'b'\nt5xxl = 'c'",
         {"model.quantization": "fp8", "model.vae": "a", "model.text_encoder": "b", "model.text_encoder_2": "c"}),
    ],
)  # fmt: skip
def test_keys_of_flow_models(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    base = "network_module = 'networks.lora_flux'\nnetwork_train_unet_only = true\nmodel_prediction_type = 'raw'\n"
    found = imported(tmp_path, train_toml=f"{base}{text}\n")
    values = values_of(found)
    assert {key: values.get(key) for key in expected} == expected and not found.loses_something


# adapters


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algo=lokr", {"lora.type": "lokr", "lora.targets": "attention-mlp-conv"}),
        ("algo=loha preset=attn-mlp", {"lora.type": "loha", "lora.targets": "attention-mlp"}),
        ("algo=diag-oft preset=attn-only constraint=1e-3",
         {"lora.type": "oft", "lora.targets": "attention", "lora.constraint": 1e-3}),
        ("algo=ia3", {"lora.type": "ia3", "lora.rank": None, "lora.targets": None}),
        ("algo=locon conv_dim=2", {"lora.type": None, "lora.conv_rank": 2}),
        ("algo=lokr factor=8 decompose_both=True preset=full train_norm=True",
         {"lora.factor": 8, "lora.decompose_both": True, "lora.train_norms": True}),
    ],
)  # fmt: skip
def test_kinds_of_lycoris(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    words = ", ".join(f"'{word}'" for word in text.split())
    found = imported(
        tmp_path, train_toml=f"network_module = 'lycoris.kohya'\nnetwork_args = [{words}]\nresolution = 1024\n"
    )
    values = values_of(found)
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize("algo", ["glora", "dylora", "boft", "full", "a_new_one"])
def test_other_kinds_are_lost(algo: str, tmp_path: Path) -> None:
    found = imported(tmp_path, train_toml=f"network_module = 'lycoris.kohya'\nnetwork_args = ['algo={algo}']\n")
    assert outcome_of(found, "network_args.algo") == "unsupported" and "lora.type" not in values_of(found)


def test_rates_of_single_blocks() -> None:
    found = import_files([KOHYA / "blocks.toml"])
    values = values_of(found)
    assert values["lora.overrides[0].match"] == r"unet\.down_blocks\.2\.(attentions|resnets)\.0\..*"
    assert values["lora.overrides[0].learning_rate"] == 5e-5
    assert values["lora.overrides[1].match"] == r"unet\.mid_block\..*"
    assert values["lora.overrides[1].learning_rate"] == 2e-4
    targets = "\n".join(values["lora.targets"])
    assert r"up_blocks\.1\.attentions\.1" in targets and r"up_blocks\.1\.attentions\.0" not in targets
    assert len(values["lora.targets"]) == 15 and not found.loses_something


def test_ranks_of_single_blocks(tmp_path: Path) -> None:
    ranks = ",".join(str(number + 1) for number in range(23))
    found = toml(tmp_path, f"resolution = 1024\nnetwork_args = ['block_dims={ranks}', 'up_lr_weight=sine']\n")
    values = values_of(found)
    ours = [key for key in values if key.endswith(".rank") and "overrides" in key]
    assert [values[key] for key in ours] == [6, 7, 9, 10, 12, 15, 16, 17, 18, 19]
    assert values["lora.overrides[0].match"] == r"unet\.down_blocks\.1\.(attentions|resnets)\.0\..*"
    assert values["lora.overrides[4].match"] == r"unet\.mid_block\.attentions\..*"


@pytest.mark.parametrize("text", ["block_dims=1,2,3", "down_lr_weight=oops", "mid_lr_weight=0"])
def test_values_of_blocks_that_cannot_be_read_are_lost(text: str, tmp_path: Path) -> None:
    found = imported(tmp_path, train_toml=f"network_module = 'networks.lora_flux'\nnetwork_args = ['{text}']\n")
    assert outcome_of(found, f"network_args.{text.partition('=')[0]}") == "unsupported"


# the GUI


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"epoch": 3, "max_train_steps": 0, "max_train_epochs": 0', {"train.epochs": 3}),
        ('"epoch": 3, "max_train_steps": 100', {"train.max_train_steps": 100, "train.epochs": None}),
        ('"text_encoder_lr": 0, "unet_lr": 1e-4', {"lora.train_text_encoder": None}),
        ('"text_encoder_lr": 0, "unet_lr": 0, "learning_rate": 1e-4',
         {"lora.train_text_encoder": True, "optim.learning_rate": 1e-4}),
        ('"lr_scheduler": "cosine", "lr_warmup": 10, "epoch": 3', {"optim.lr_warmup_ratio": 0.1}),
        ('"lr_scheduler": "cosine", "lr_warmup": 10, "max_train_steps": 159', {"optim.lr_warmup_steps": 16}),
        ('"lr_scheduler": "cosine", "lr_warmup": 10, "lr_warmup_steps": 7', {"optim.lr_warmup_steps": 7}),
        ('"noise_offset": 0.1, "multires_noise_iterations": 6, "noise_offset_type": "Multires"',
         {"objective.noise_offset": None, "objective.multires_noise_iterations": 6}),
        ('"noise_offset": 0.1, "multires_noise_iterations": 6, "noise_offset_type": "Original"',
         {"objective.noise_offset": 0.1, "objective.multires_noise_iterations": None}),
        ('"seed": 0, "min_snr_gamma": 0, "scale_weight_norms": 0',
         {"train.seed": None, "lora.scale_weight_norms": None}),
        ('"conv_dim": 8, "conv_alpha": 8, "factor": 4', {"lora.conv_rank": None, "lora.factor": None}),
        ('"optimizer": "AdamW", "optimizer_args": "weight_decay=0.1 betas=0.9,0.98"',
         {"optim.optimizer_args": ["weight_decay=0.1", "betas=0.9,0.98"]}),
        ('"additional_parameters": "--zero_terminal_snr --network_dim 5", "network_dim": 3',
         {"objective.zero_terminal_snr": True, "lora.rank": 5}),
        ('"max_resolution": "1024,1024", "clip_skip": "1", "caption_extension": ""',
         {"data.resolution": 1024, "data.caption_extension": ".caption"}),
        ('"lora_network_weights": "a.safetensors"', {"lora.init_from": "a.safetensors"}),
        ('"sample_prompts": "a cat\\n# no\\na dog --w 64"', {"sample.prompts": ["a cat", "a dog --w 64"]}),
    ],
)  # fmt: skip
def test_fields_of_the_gui(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    values = values_of(gui(tmp_path, text))
    assert {key: values.get(key) for key in expected} == expected


def test_only_the_text_encoders(tmp_path: Path) -> None:
    assert outcome_of(gui(tmp_path, '"text_encoder_lr": 1e-4, "unet_lr": 0'), "unet_lr") == "unsupported"


def test_fields_of_other_kinds_are_not_lost() -> None:
    found = import_files([KOHYA / "gui-flux.json"])
    for key in ("conv_dim", "factor", "sdxl_no_half_vae", "min_snr_gamma", "noise_offset", "LyCORIS_preset"):
        assert outcome_of(found, key) == "not-needed"


def test_a_preset_without_a_network_is_not_taken_for_a_lora(tmp_path: Path) -> None:
    found = imported(tmp_path, a_toml="pretrained_model_name_or_path = 'a'\noptimizer_type = 'AdamW'\n")
    assert [part.line for part in found.unread] == [1] and found.loses_something


def test_easy_training_scripts() -> None:
    found = import_files([KOHYA / "easy.toml"])
    values = values_of(found)
    assert values["data.path"] == "C:/sets/zwx" and values["data.keep_tokens"] == 1
    assert values["optim.optimizer_args"] == ["weight_decay=0.1", "betas=0.9,0.99"]
    assert (values["optim.lr_scheduler"], values["lora.conv_rank"], values["lora.use_dora"]) == ("rex", 16, True)
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    assert lost == {"keep_tokens_separator", "lr_scheduler_args.min_lr"}


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("p.txt", "a cat --w 64\n# b\n\na dog\n", ["a cat --w 64", "a dog"]),
        ("p.json", '["a cat", "a dog"]', ["a cat", "a dog"]),
        ("p.json", '[{"prompt": "a cat", "width": 64, "extra": 2}]', [{"prompt": "a cat", "width": 64}]),
        ("p.toml", "[prompt]\nwidth=8\n[[prompt.subset]]\nprompt = 'a'\n[[prompt.subset]]\nprompt = 'b'\nwidth = 16\n",
         [{"prompt": "a", "width": 8}, {"prompt": "b", "width": 16}]),
    ],
)  # fmt: skip
def test_prompts_of_a_file(name: str, text: str, prompts: list[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = toml(tmp_path, f"sample_prompts = 'C:\\\\elsewhere\\\\{name}'\n".replace("'", '"'))
    assert YAML(typ="safe").load(found.text)["sample"]["prompts"] == prompts


def test_prompts_that_are_not_here_change_no_weights(tmp_path: Path) -> None:
    found = toml(tmp_path, "sample_prompts = 'nowhere.txt'\n")
    assert outcome_of(found, "sample_prompts") == "unsupported" and found.unread and not found.loses_something


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody/a", "a\\u0000b", "/", "."])
def test_a_name_that_no_file_can_have_is_unread(name: str, tmp_path: Path) -> None:
    found = toml(tmp_path, f'dataset_config = "{name}"\n')
    assert len(found.unread) == 1 and found.loses_something


def test_a_script_with_two_commands() -> None:
    found = import_files([KOHYA / "two-phases.ps1"])
    assert values_of(found)["lora.rank"] == 256 and values_of(found)["data.path"] == "D:/dataset/harold/img"
    assert [part.line for part in found.unread] == [12]


# every row


def test_each_option_of_the_scripts_and_each_field_of_the_gui_is_known() -> None:
    lines = (KOHYA / "options.txt").read_text("utf-8").splitlines()
    names = {line for line in lines if line and line[0] != "#"}
    known = {key for row in table_of("kohya").row for key in row.keys} | {*kohya.OF_SD3}
    assert len(names) > 300 and {name for name in names - known if not Setting(name, "x").is_secret} == set()


def _sample(row: MappingRow) -> str:
    return "3" if row.kind == "convert" else "'x'"


@pytest.mark.parametrize("row", table_of("kohya").row, ids=lambda row: row.keys[0])
def test_each_key_of_the_table_has_the_outcome_of_its_row(row: MappingRow, tmp_path: Path) -> None:
    keys = [key for key in row.keys if "." not in key and key not in ("config_file", "script")]
    text = "\n".join(f"{key} = {_sample(row)}" for key in keys)
    try:
        found = imported(tmp_path, a_toml=f"network_dim = 4\n{text}\n" if "network_dim" not in keys else text)
    except UserError as error:
        assert error.code == "import-family"
        return
    outcomes = {each.setting.key: each.outcome for each in found.outcomes}
    assert all(key in outcomes for key in keys)
    if row.kind == "unsupported":
        assert {outcomes[key] for key in keys} <= {"unsupported", "not-needed"}


def test_rank_and_alpha_of_a_file(tmp_path: Path) -> None:
    """``create_network_from_weights`` takes both from the file. Without the file the options count."""
    weights = tmp_path / "a.safetensors"
    text = f"network_dim = 4\nnetwork_alpha = 2\nnetwork_weights = '{weights}'\ndim_from_weights = true\n"
    lost = imported(tmp_path, a_toml=text)
    assert outcome_of(lost, "dim_from_weights") == "unsupported" and values_of(lost)["lora.alpha"] == 2
    save_file({"lora_unet_mid_block_x.lora_down.weight": np.zeros((3, 8), np.float32)}, weights)
    found = imported(tmp_path, a_toml=text)
    assert outcome_of(found, "dim_from_weights") == "taken" and values_of(found)["lora.rank"] == "auto"
    assert outcome_of(found, "network_alpha") == "not-needed" and "lora.alpha" not in values_of(found)


@pytest.mark.parametrize("value", ["0", "true", "false", "'1e-3'", "[]", "[1, 'x']", "-5", "''", "{}", "1e30"])
def test_no_value_of_any_key_is_an_error(value: str, tmp_path: Path) -> None:
    keys = [key for row in table_of("kohya").row for key in row.keys if "." not in key]
    skipped = ("sd3_checkbox", "config_file", "dataset_config", "model_type")
    text = "\n".join(f"{key} = {value}" for key in keys if key not in skipped)
    found = imported(tmp_path, a_toml=text)
    assert {row.setting.key for row in found.outcomes} >= {key for key in keys if key not in skipped}
