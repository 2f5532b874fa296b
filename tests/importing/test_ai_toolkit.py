"""ai-toolkit's jobs as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import ImportedRecipe, import_files
from lora_rocm.importing.rows import table_of
from lora_rocm.importing.trainers import ai_toolkit, ai_toolkit_data, ai_toolkit_train
from tests.importing.imported import CONFIGS, check_outcomes, outcome_of, row_of, values_of
from tests.importing.test_onetrainer import merged, nested

FOLDER = CONFIGS / "ai-toolkit"
PROBES = (True, 0.5, "x", None, ["x"], {}, -1)
SMALL: dict[str, Any] = {
    "type": "sd_trainer",
    "network": {"type": "lora"},
    "model": {"name_or_path": "base", "arch": "sdxl"},
    "datasets": [{"folder_path": "images"}],
}


def job(**keys: Any) -> str:
    """A small job with these keys in its process."""
    process = SMALL
    for key, value in keys.items():
        process = merged(process, {key: value})
    return json.dumps({"job": "extension", "config": {"name": "cat", "process": [process]}})


def of(folder: Path, **keys: Any) -> ImportedRecipe:
    """The recipe of a small job."""
    path = folder / "job.json"
    path.write_text(job(**keys), encoding="utf-8")
    return import_files([path])


def dataset_of(folder: Path, **keys: Any) -> ImportedRecipe:
    """The recipe of a small job with one dataset."""
    return of(folder, datasets=[{"folder_path": "images", **keys}])


# whole recipes, checked key by key with the source

FLUX = {
    "model.family": "flux",
    "model.quantization": "fp8",
    "model.text_encoder_quantization": "fp8",
    "data.path": "/path/to/images/folder",
    "data.caption_extension": ".txt",
    "data.caption_fallback": "empty",
    "data.caption_dropout_rate": 0.05,
    "lora.rank": 16,
    "lora.alpha": 16,
    "lora.targets": "all-linear",
    "optim.optimizer": "adamw_8bit",
    "optim.learning_rate": 0.0001,
    "optim.weight_decay": 0.01,
    "optim.lr_scheduler": "constant",
    "optim.epsilon": 1e-6,
    "objective.shift": 1,
    "train.batch_size": 1,
    "train.gradient_accumulation_steps": 1,
    "train.mixed_precision": "bf16",
    "sample.every_n_steps": 250,
    "sample.seed": 42,
    "sample.guidance_scale": 4,
    "sample.steps": 20,
    "sample.width": 1024,
    "sample.height": 1024,
    "output.dir": "output",
    "output.save_every_n_steps": 250,
    "output.keep_last_loras": 4,
    "output.dtype": "fp16",
}


def test_flux() -> None:
    values = values_of(import_files([FOLDER / "train_lora_flux_24gb.yaml"]))
    prompts = values.pop("sample.prompts")
    assert len(prompts) == 10
    assert values == {
        **FLUX,
        "model.name_or_path": "black-forest-labs/FLUX.1-dev",
        "data.resolution": [512, 768, 1024],
        "data.bucket_step": 32,
        "objective.timestep_sampling": "logit-normal",
        "train.max_train_steps": 2000,
        "train.ema_decay": 0.99,
        "output.name": "my_first_flux_lora_v1",
    }


def test_kontext() -> None:
    found = import_files([FOLDER / "train_lora_flux_kontext_24gb.yaml"])
    values = values_of(found)
    prompts = {key: values.pop(key) for key in [*values] if key.startswith("sample.prompts[")}
    assert len(prompts) == 20
    assert prompts["sample.prompts[0].prompt"] == "make the person smile"
    assert prompts["sample.prompts[9].control_image"] == "/path/to/control/folder/person1.jpg"
    assert values == {
        **FLUX,
        "model.name_or_path": "black-forest-labs/FLUX.1-Kontext-dev",
        "model.variant": "kontext",
        "data.resolution": [512, 768],
        "data.control_path": "/path/to/control/folder",
        "data.bucket_step": 16,
        "objective.timestep_sampling": "uniform",
        "train.max_train_steps": 3000,
        "output.name": "my_first_flux_kontext_lora_v1",
    }
    assert [row.setting.key for row in found.outcomes if row.outcome == "unsupported"] == ["train.timestep_type"]


def test_sdxl_of_the_web_page() -> None:
    found = import_files([FOLDER / "page-sdxl.json"])
    assert values_of(found) == {
        "model.family": "sdxl",
        "model.name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
        "data.path": "C:/data/cat",
        "data.resolution": [512, 768, 1024],
        "data.caption_extension": ".txt",
        "data.caption_fallback": "empty",
        "data.caption_dropout_rate": 0.05,
        "data.bucket_step": 16,
        "lora.rank": 32,
        "lora.alpha": 32,
        "lora.targets": "attention-mlp-conv",
        "lora.conv_rank": 16,
        "lora.conv_alpha": 16,
        "optim.optimizer": "adamw_8bit",
        "optim.learning_rate": 0.0001,
        "optim.weight_decay": 0.0001,
        "optim.lr_scheduler": "constant",
        "optim.epsilon": 1e-6,
        "train.max_train_steps": 3000,
        "train.batch_size": 1,
        "train.gradient_accumulation_steps": 1,
        "train.mixed_precision": "bf16",
        "sample.every_n_steps": 250,
        "sample.prompts": ["woman with red hair, playing chess", "[trigger] at the beach"],
        "sample.sampler": "ddpm",
        "sample.seed": 42,
        "sample.guidance_scale": 6,
        "sample.steps": 25,
        "sample.width": 1024,
        "sample.height": 1024,
        "output.name": "my_first_lora_v1",
        "output.dir": "output",
        "output.save_every_n_steps": 250,
        "output.keep_last_loras": 4,
        "output.dtype": "bf16",
    }
    assert not found.loses_something


# properties


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_each_setting_has_one_outcome(path: Path) -> None:
    check_outcomes([path])


DATASET_KEYS = {
    *ai_toolkit_data.SAME, *ai_toolkit_data.LOST, *ai_toolkit_data.WITHOUT_EFFECT, "buckets", "no_such_key",
    "control_path_1",
}  # fmt: skip


@pytest.mark.parametrize(("arch", "probes"), [("sdxl", PROBES), ("flux", (True, 0.5, "x"))])
def test_any_value_of_any_key_has_an_outcome(arch: str, probes: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    keys = [key for row in table_of("ai-toolkit").row for key in row.keys if key not in ("job", "type", "name")]
    keys = [key for key in keys if not key.startswith(("config.", "meta.")) and f"{key}." not in " ".join(keys)]
    keys += [f"train.optimizer_params.{key}" for key in (*ai_toolkit_train.PARAMETERS, "eps", "decouple", "other")]
    keys += [f"train.lr_scheduler_params.{key}" for key in ("eta_min", "T_max", "num_warmup_steps", "other")]
    keys += [f"sample.{key}" for key in (*ai_toolkit_data.SAMPLE_KEYS, *ai_toolkit_data.UNSEEN, "prompts", "other")]
    keys += [f"network.{key}" for key in ("conv", "conv_alpha", "alpha", "rank", "lokr_factor", "transformer_only")]
    for probe in probes:
        for first in range(3):
            process: dict[str, Any] = merged(SMALL, {"model": {"arch": arch}, "datasets": []})
            for key in keys[first::3]:
                process = merged(process, nested(key, probe))
            dataset = {
                "folder_path": "images",
                **dict.fromkeys(sorted(DATASET_KEYS - {"folder_path"})[first::3], probe),
            }
            process["datasets"] = [dataset]
            whole = {"job": "extension", "config": {"name": "cat", "process": [process]}}
            path.write_text(json.dumps(whole), encoding="utf-8")
            check_outcomes([path])


# defaults


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    values = values_of(of(tmp_path))
    own = {key: values[key] for key in ("lora.rank", "lora.alpha", "lora.targets", "optim.epsilon", "optim.optimizer")}
    assert own == {
        "lora.rank": 4, "lora.alpha": 1, "lora.targets": "attention-mlp", "optim.epsilon": 1e-6,
        "optim.optimizer": "adamw",
    }  # fmt: skip
    assert values["optim.learning_rate"] == 1e-6
    assert values["train.max_train_steps"] == 1000
    assert values["train.mixed_precision"] == "no"
    assert values["data.resolution"] == 512
    assert values["output.dtype"] == "fp16"
    assert "sample.width" not in values


def test_a_job_that_trains_all_weights(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = "job: extension\nconfig:\n  name: a\n  process:\n  - type: sd_trainer\n    model: {name_or_path: base}\n"
    path.write_text(text, encoding="utf-8")
    found = import_files([path])
    assert outcome_of(found, "type") == "unsupported"
    assert values_of(found)["model.family"] == "sd15"


# files


@pytest.mark.parametrize(
    ("model", "family", "variant"),
    [
        ({"arch": "flux"}, "flux", None),
        ({"arch": "", "is_flux": True, "name_or_path": "black-forest-labs/FLUX.1-schnell"}, "flux", "schnell"),
        ({"arch": "zimage:turbo"}, "z-image", "turbo"),
        ({"arch": "zimage:deturbo", "name_or_path": "ostris/Z-Image-De-Turbo"}, "z-image", None),
        ({"arch": "anima"}, "anima", None),
        ({"arch": "sd15"}, "sd15", None),
        ({"arch": "", "is_v2": True}, "sd2", None),
    ],
)
def test_families(model: dict[str, Any], family: str, variant: str | None, tmp_path: Path) -> None:
    values = values_of(of(tmp_path, model=model))
    assert (values["model.family"], values.get("model.variant")) == (family, variant)


@pytest.mark.parametrize("arch", [*ai_toolkit.OTHER_BASES, "new_model:14b"])
def test_a_base_of_another_family_is_refused(arch: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        of(tmp_path, model={"arch": arch})
    assert caught.value.code == "import-family"


def test_another_kind_of_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        of(tmp_path, type="concept_slider")
    assert caught.value.code == "import-family"


def test_variables_and_names_in_texts(tmp_path: Path) -> None:
    found = of(tmp_path, training_folder="${HOME}/out", model={"name_or_path": "[name].safetensors"})
    assert [part.why.partition(" ")[0] for part in found.unread] == ["config.process[0].training_folder"]
    assert values_of(found)["model.name_or_path"] == "cat.safetensors"
    assert "output.dir" not in values_of(found)


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    lines = (FOLDER / "train_lora_flux_24gb.yaml").read_text(encoding="utf-8").splitlines()
    at = next(index for index, line in enumerate(lines) if "noise_scheduler" in line)
    path.write_text("\n".join([*lines[:at], '   "broken: [', *lines[at:]]), encoding="utf-8")
    found = import_files([path])
    assert found.unread[0].line == at + 1
    assert values_of(found)["lora.rank"] == 16


def test_further_processes_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    whole = json.loads(job())
    whole["config"]["process"].append({"type": "other"})
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert outcome_of(import_files([path]), "config.process[1].type") == "unsupported"


def test_options_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(job(), encoding="utf-8")
    found = import_files([path], ["config.process[0].train.lr=0.002", "datasets[0].resolution=768", "nothing"])
    assert values_of(found)["optim.learning_rate"] == 0.002
    assert values_of(found)["data.resolution"] == 768
    assert len(found.unread) == 1


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    found = of(tmp_path, hf_token="hf_abcdefghijklmnopqrstuvwxyz0123")
    assert "hf_abc" not in found.text
    assert row_of(found, "hf_token").setting.shown == "***"


# single conversions


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"network": {"type": "lokr"}}, "lora.rank", 2048),
        ({"network": {"type": "lokr", "lokr_full_rank": False, "linear": 8}}, "lora.rank", 8),
        ({"network": {"rank": 12, "linear": 8}}, "lora.rank", 12),
        ({"network": {"linear": 8, "linear_alpha": 2}}, "lora.alpha", 2),
        ({"model": {"arch": "anima"}, "network": {"linear": 8, "linear_alpha": 2}}, "lora.alpha", 8),
        ({"model": {"arch": "zimage"}}, "lora.targets", [r"layers\.\d+\..*"]),
        ({"model": {"arch": "anima"}, "network": {"transformer_only": False}}, "lora.targets", [".*"]),
        (
            {"model": {"arch": "flux"}, "network": {"network_kwargs": {"only_if_contains": ["transformer.a.7"]}}},
            "lora.targets",
            [r"(?=.*(a\.7))(single_)?transformer_blocks\.\d+\..*"],
        ),
        ({"network": {"conv": 8}}, "lora.conv_alpha", 8),
        ({"network": {"type": "locon", "conv": 8, "conv_alpha": 2}}, "lora.conv_alpha", 2),
        ({"network": {"type": "lycoris"}}, "lora.targets", "attention-mlp-conv"),
        ({"network": {"type": "dora"}}, "lora.use_dora", True),
        ({"train": {"optimizer": "prodigy8bit", "lr": 1e-4}}, "optim.learning_rate", 1.0),
        ({"train": {"optimizer": "prodigy", "lr": 0.5}}, "optim.learning_rate", 0.5),
        ({"train": {"optimizer": "adafactor"}}, "optim.weight_decay", 0.0),
        ({"train": {"unet_lr": 2e-4, "lr": 1e-4}}, "optim.learning_rate", 2e-4),
        ({"train": {"train_text_encoder": True, "text_encoder_lr": 1e-5}}, "optim.text_encoder_learning_rate", 1e-5),
        ({"train": {"train_text_encoder": True, "unet_lr": 1, "lr": 1e-5}}, "optim.text_encoder_learning_rate", 1e-5),
        ({"network": {"dropout": 0.1}}, "lora.dropout", 0.1),
        ({"train": {"lr_scheduler": "cosine", "lr_scheduler_params": {"T_max": 50}}}, "optim.lr_cosine_steps", 50),
        (
            {"train": {"lr": 1e-4, "lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": 1e-5}}},
            "optim.lr_min_ratio",
            0.1,
        ),
        ({"train": {"lr_scheduler": "constant_with_warmup"}}, "optim.lr_warmup_steps", 1000),
        ({"train": {"gradient_accumulation": 4, "steps": 100}}, "train.max_train_steps", 100),
        ({"train": {"gradient_accumulation": 4}}, "train.gradient_accumulation_steps", 4),
        ({"train": {"gradient_accumulation_steps": 4, "steps": 103}}, "train.max_train_steps", 25),
        (
            {"train": {"gradient_accumulation": 1, "gradient_accumulation_steps": 4}},
            "train.gradient_accumulation_steps",
            1,
        ),
        ({"train": {"ema_config": {"use_ema": True}}}, "train.ema_decay", 0.999),
        ({"train": {"min_denoising_steps": 100}}, "objective.max_timestep", 900),
        ({"train": {"max_denoising_steps": 499}}, "objective.min_timestep", 500),
        ({"train": {"loss_type": "pseudo_huber"}}, "objective.huber_c", 0.01),
        ({"train": {"loss_type": "mae"}}, "objective.loss_type", "l1"),
        ({"model": {"arch": "flux"}, "train": {"timestep_type": "flux_shift"}}, "objective.shift", "resolution"),
        ({"model": {"arch": "zimage"}, "train": {"timestep_type": "shift"}}, "objective.shift", 3),
        ({"model": {"arch": "flux"}, "train": {"linear_timesteps": True}}, "objective.timestep_sampling", "uniform"),
        ({"model": {"arch": "flux", "quantize": True, "qtype": "uint4|a/b.safetensors"}}, "model.quantization", "nf4"),
        ({"model": {"arch": "flux", "te_name_or_path": "t5"}}, "model.text_encoder_2", "t5"),
        ({"model": {"is_v_pred": True}}, "model.prediction_type", "v_prediction"),
        ({"model": {"assistant_lora_path": "a/b/c.safetensors"}}, "model.training_adapter", "a/b/c.safetensors"),
        ({"logging": {"use_wandb": True, "project_name": "cats"}}, "output.log_project", "cats"),
    ],
)
def test_conversions(keys: dict[str, Any], ours: str, value: Any, tmp_path: Path) -> None:
    assert values_of(of(tmp_path, **keys))[ours] == value


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"network": {"type": "lorm"}}, "network.type"),
        ({"network": {"network_kwargs": {"only_if_contains": ["x"]}}}, "network.network_kwargs.only_if_contains"),
        ({"train": {"optimizer": "adagrad"}}, "train.optimizer"),
        ({"train": {"lr_scheduler": "linear"}}, "train.lr_scheduler"),
        ({"train": {"lr_scheduler": "step"}}, "train.lr_scheduler"),
        ({"train": {"gradient_accumulation_steps": -1}}, "train.gradient_accumulation_steps"),
        ({"train": {"noise_scheduler": "flowmatch"}}, "train.noise_scheduler"),
        ({"train": {"content_or_style": "style"}}, "train.content_or_style"),
        ({"train": {"snr_gamma": 5}}, "train.snr_gamma"),
        ({"train": {"cfg_scale": 2}}, "train.cfg_scale"),
        ({"train": {"diff_output_preservation": True}}, "train.diff_output_preservation"),
        ({"train": {"do_differential_guidance": True}}, "train.do_differential_guidance"),
        ({"train": {"loss_type": "wavelet"}}, "train.loss_type"),
        ({"model": {"arch": "flux"}, "train": {"bypass_guidance_embedding": True}}, "train.bypass_guidance_embedding"),
        ({"model": {"arch": "flux"}, "train": {"timestep_type": "one_step"}}, "train.timestep_type"),
        ({"model": {"arch": "flux"}, "train": {"min_denoising_steps": 100}}, "train.min_denoising_steps"),
        ({"model": {"arch": "flux"}, "train": {"train_text_encoder": True}}, "train.train_text_encoder"),
        ({"model": {"lora_path": "a"}}, "model.lora_path"),
        ({"model": {"model_kwargs": {"a": 1}}}, "model.model_kwargs.a"),
    ],
)
def test_lost_settings(keys: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert outcome_of(of(tmp_path, **keys), key) == "unsupported"


def test_uploads_and_measurements_do_not_change_the_weights(tmp_path: Path) -> None:
    found = of(
        tmp_path, save={"push_to_hub": True}, model={"inference_lora_path": "a"}, train={"validation_config": "a"}
    )
    rows = [row_of(found, key) for key in ("save.push_to_hub", "model.inference_lora_path", "train.validation_config")]
    assert [(row.outcome, row.changes_weights) for row in rows] == [("unsupported", False)] * 3


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"caption_ext": "caption"}, "caption_extension", ".caption"),
        ({"dataset_path": "D:\\cats", "folder_path": None}, "path", "D:/cats"),
        ({"trigger_word": "zibu"}, "caption_fallback", "trigger"),
        ({"trigger_word": "zibu", "default_caption": "zibu"}, "caption_fallback", "trigger"),
        ({"default_caption": "a cat"}, "caption_fallback", "empty"),
        ({"shuffle_tokens": True}, "caption_variants", 16),
        ({"token_dropout_rate": 0.2, "keep_tokens": 2}, "keep_tokens", 2),
        ({"mask_path": "masks", "mask_min_value": 0.1}, "unmasked_weight", 0.1),
        ({"alpha_mask": True}, "alpha_mask", True),
        ({"loss_multiplier": 2}, "loss_weight", 2),
        ({"flip_x": True}, "flip_aug", True),
        ({"buckets": False}, "enable_bucket", False),
    ],
)
def test_datasets(keys: dict[str, Any], ours: str, value: Any, tmp_path: Path) -> None:
    assert values_of(dataset_of(tmp_path, **keys))[f"data.{ours}"] == value


@pytest.mark.parametrize(
    ("keys", "key", "outcome"),
    [
        ({"mask_min_value": 0.1}, "mask_min_value", "not-needed"),
        ({"keep_tokens": 2}, "keep_tokens", "not-needed"),
        ({"default_caption": "a cat"}, "default_caption", "unsupported"),
        ({"network_weight": 0.5}, "network_weight", "unsupported"),
        ({"flip_y": True}, "flip_y", "unsupported"),
        ({"control_path": "controls"}, "control_path", "unsupported"),
        ({"num_frames": 33}, "num_frames", "unsupported"),
        ({"augmentations": [{"method": "Blur"}]}, "augmentations[0].method", "unsupported"),
    ],
)
def test_settings_of_datasets(keys: dict[str, Any], key: str, outcome: str, tmp_path: Path) -> None:
    assert outcome_of(dataset_of(tmp_path, **keys), f"datasets[0].{key}") == outcome


def test_regularisation_images_have_no_trigger_word(tmp_path: Path) -> None:
    sets = [{"folder_path": "cats"}, {"folder_path": "pets", "is_reg": True}]
    values = values_of(of(tmp_path, datasets=sets, trigger_word="zibu", train={"reg_weight": 0.5}))
    assert values["data.sources[0].trigger_word"] == "zibu"
    assert "data.sources[1].trigger_word" not in values
    assert values["data.sources[1].is_reg"] is True
    assert values["data.prior_loss_weight"] == 0.5


def test_previews(tmp_path: Path) -> None:
    sample = {"samples": [{"prompt": "[trigger] --cfg 5 --seed 7", "width": 640}, {"prompt": "b", "neg": "dog"}]}
    found = of(tmp_path, trigger_word="zibu", sample={**sample, "seed": 3, "sampler": "flowmatch", "sample_every": 50})
    own = {key: value for key, value in values_of(found).items() if key.startswith("sample.")}
    assert own == {
        "sample.prompts[0].prompt": "zibu", "sample.prompts[0].guidance_scale": 5, "sample.prompts[0].seed": 7,
        "sample.prompts[0].width": 640, "sample.prompts[1].prompt": "b", "sample.prompts[1].negative_prompt": "dog",
        "sample.prompts[1].seed": 3, "sample.seed": 3, "sample.width": 512, "sample.height": 512, "sample.steps": 20,
        "sample.guidance_scale": 7, "sample.sampler": "euler", "sample.every_n_steps": 50,
    }  # fmt: skip


def test_previews_that_are_off(tmp_path: Path) -> None:
    found = of(tmp_path, train={"disable_sampling": True}, sample={"prompts": ["a cat"], "width": 640})
    assert not any(key.startswith("sample.") for key in values_of(found))
    assert outcome_of(found, "sample.prompts") == "not-needed"
