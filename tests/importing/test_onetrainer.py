"""OneTrainer's presets, concepts and samples as recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands.import_config import import_config
from lora_rocm.errors import UserError
from lora_rocm.importing.importer import ImportedRecipe, import_files, translated
from lora_rocm.importing.rows import MappingRow, table_of
from lora_rocm.importing.trainers import onetrainer, onetrainer_data, onetrainer_optimizer
from tests.importing.imported import CONFIGS, check_outcomes, outcome_of, row_of, values_of

FOLDER = CONFIGS / "onetrainer"
SMALL = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "base"}
NO_TEXT = {"text_encoder": {"train": False}, "text_encoder_2": {"train": False}}
PROBES = (True, 1, 0.5, "x", None, [], -1)


def of(folder: Path, **keys: Any) -> ImportedRecipe:
    """The recipe of a small configuration with these keys."""
    path = folder / "config.json"
    path.write_text(json.dumps({**SMALL, **NO_TEXT, **keys}), encoding="utf-8")
    return import_files([path])


def concept_of(folder: Path, **keys: Any) -> ImportedRecipe:
    """The recipe of a small configuration with one concept."""
    return of(folder, concepts=[{"path": "images", **keys}])


# whole recipes, checked key by key with the source


def test_sdxl_with_concepts_and_samples() -> None:
    found = import_files([FOLDER / "sdxl.json"])
    assert values_of(found) == {
        "model.family": "sdxl",
        "model.name_or_path": "D:/models/illustrious.safetensors",
        "model.vae": "vae.safetensors",
        "data.sources[0].path": "D:/images/cat",
        "data.sources[0].recursive": True,
        "data.sources[0].repeats": 2,
        "data.sources[0].loss_weight": 0.5,
        "data.sources[0].random_crop": 3,
        "data.sources[0].flip_aug": True,
        "data.sources[0].resolution": 627,
        "data.sources[0].caption_fallback": "empty",
        "data.sources[0].keep_tokens": 2,
        "data.sources[0].shuffle_caption": True,
        "data.sources[0].caption_tag_dropout_rate": 0.1,
        "data.sources[1].path": "D:/images/plain",
        "data.sources[1].recursive": False,
        "data.sources[1].caption_fallback": "filename",
        "data.resolution": [768, 1024],
        "data.caption_dropout_rate": 0.05,
        "data.mask_path": "beside",
        "data.unmasked_weight": 0.2,
        "data.normalize_masked_area_loss": False,
        "data.bucket_max_aspect": 4.0,
        "data.enable_bucket": True,
        "data.upscale": True,
        "data.caption_variants": 16,
        "lora.rank": 32,
        "lora.alpha": 16,
        "lora.dropout": 0.1,
        "lora.targets": ".*",
        "lora.train_text_encoder": True,
        "lora.new_tokens[0].token": "<zibu>",
        "lora.new_tokens[0].vectors": 2,
        "lora.new_tokens[0].init": "creature",
        "lora.use_dora": True,
        "optim.optimizer": "adamw_8bit",
        "optim.learning_rate": 0.0004,  # of the UNet, times the root of the batch size
        "optim.text_encoder_learning_rate": 0.0001,
        "optim.weight_decay": 0.1,
        "optim.lr_scheduler": "cosine_with_restarts",
        "optim.lr_scheduler_num_cycles": 3,
        "optim.lr_min_ratio": 0.1,
        "optim.lr_warmup_steps": 50,
        "optim.lr_warmup_from_zero": True,
        "optim.max_grad_norm": 0,
        "optim.betas": [0.9, 0.99],
        "optim.epsilon": 1e-6,
        "objective.min_snr_gamma": 5.0,
        "objective.noise_offset": 0.05,
        "objective.timestep_sampling": "logit-normal",
        "objective.logit_mean": 0.5,
        "objective.logit_std": 1.2,
        "objective.min_timestep": 100,
        "train.epochs": 10,
        "train.batch_size": 4,
        "train.gradient_accumulation_steps": 2,
        "train.mixed_precision": "bf16",
        "train.ema_decay": 0.99,
        "sample.every_n_steps": 50,
        "sample.prompts[0].prompt": "a cat",
        "sample.prompts[0].width": 1024,
        "sample.prompts[1].prompt": "a dog",
        "sample.prompts[1].width": 768,
        "sample.negative_prompt": "blurry",
        "sample.sampler": "euler_a",
        "sample.seed": 42,
        "sample.guidance_scale": 7.0,
        "sample.steps": 20,
        "sample.height": 1024,
        "output.name": "cat",
        "output.dir": "D:/loras",
        "output.save_every_n_epochs": 1,
        "output.save_every_minutes": 60,
        "output.keep_last": 3,
        "output.formats": ["kohya"],
        "output.dtype": "bf16",
    }
    assert "hf_" not in found.text
    assert outcome_of(found, "secrets.huggingface_token") == "not-needed"
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    assert lost == {"concepts[0].image.enable_random_hue", "concepts[2].type"}


def test_z_image_with_a_lokr() -> None:
    found = import_files([FOLDER / "z-image.json"])
    assert values_of(found) == {
        "model.family": "z-image",
        "model.name_or_path": "Tongyi-MAI/Z-Image",
        "model.quantization": "int8",
        "model.text_encoder_quantization": "nf4",
        "data.path": "images/cat",
        "data.caption_fallback": "empty",
        "data.resolution": 512,
        "data.random_crop": True,
        "data.recursive": False,
        "data.bucket_max_aspect": 4.0,
        "data.enable_bucket": True,
        "data.upscale": True,
        "lora.type": "lokr",
        "lora.rank": 8,
        "lora.alpha": 8,
        "lora.factor": 16,
        "lora.targets": "attention-mlp",
        "optim.optimizer": "came",
        "optim.learning_rate": 0.0003,
        "optim.weight_decay": 0.0,
        "optim.lr_warmup_ratio": 0.1,
        "optim.lr_warmup_from_zero": True,
        "optim.betas": [0.9, 0.999, 0.999],
        "objective.timestep_sampling": "logit-normal",
        "objective.max_timestep": 964,
        "objective.shift": 2.8,
        "objective.loss_type": "huber",
        "objective.huber_schedule": "constant",
        "objective.huber_c": 0.5,
        "train.epochs": 10,
        "train.batch_size": 2,
        "train.gradient_accumulation_steps": 1,
        "train.mixed_precision": "bf16",
        "output.name": "model",
        "output.dir": "models",
        "output.save_every_minutes": 30,
        "output.dtype": "bf16",
    }
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    text = {"concepts[0].text.prompt_source", "concepts[0].text.prompt_path"}
    assert lost == {"output_model_format", "loss_weight_fn", "optimizer.use_cautious", *text}


def test_flux_with_prodigy() -> None:
    found = import_files([FOLDER / "flux.json"])
    assert values_of(found) == {
        "model.family": "flux",
        "model.name_or_path": "black-forest-labs/FLUX.1-dev",
        "model.quantization": "nf4",
        "model.guidance": 3.5,
        "data.path": "/data/cat",
        "data.resolution": 768,
        "data.caption_fallback": "empty",
        "data.random_crop": True,
        "data.recursive": False,
        "data.bucket_max_aspect": 4.0,
        "data.enable_bucket": True,
        "data.upscale": True,
        "lora.rank": 16,
        "lora.alpha": 1,
        "lora.targets": [r".*(attn\.to_q).*", r".*(ff\.net).*"],
        "optim.optimizer": "prodigy",
        "optim.learning_rate": 1.0,
        "optim.weight_decay": 0.01,
        "optim.lr_scheduler": "constant",
        "optim.betas": [0.9, 0.999],
        "optim.d0": 1e-6,
        "optim.d_coef": 2.0,
        "optim.safeguard_warmup": True,
        "optim.use_bias_correction": False,
        "objective.timestep_sampling": "uniform",
        "objective.shift": "resolution",
        "train.epochs": 100,
        "train.batch_size": 4,
        "train.gradient_accumulation_steps": 1,
        "train.mixed_precision": "bf16",
        "sample.every_n_epochs": 1,
        "sample.prompts": ["a cat"],
        "sample.seed": 42,
        "sample.guidance_scale": 1.0,
        "sample.steps": 30,
        "sample.width": 1024,
        "sample.height": 1024,
        "output.name": "lora",
        "output.dir": "models",
        "output.formats": ["diffusers"],
        "output.dtype": "fp32",
    }
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    other = {"mae_strength", "mse_strength", "perturbation_noise_weight"}
    assert lost == {"text_encoder_2.train", "text_encoder_2.weight_dtype", *other}


# properties


@pytest.mark.parametrize("name", ["sdxl", "z-image", "flux"])
def test_each_setting_has_one_outcome(name: str) -> None:
    check_outcomes([FOLDER / f"{name}.json"])


def nested(key: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``a.b``."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: merged(one[name], other[name]) for name in one.keys() & other.keys() if isinstance(one[name], dict)
            and isinstance(other[name], dict)}  # fmt: skip
    return {**one, **other, **both}


def keys_of(rows: tuple[MappingRow, ...]) -> list[str]:
    return [key for row in rows for key in row.keys]


CONCEPT_KEYS = {*onetrainer_data.KNOWN_LEAVES, *onetrainer_data.CHANGED_IMAGES, "name", "seed", "no_such_key"}
OPTIMIZER_KEYS = {
    *onetrainer_optimizer.LOST, *(key for keys in onetrainer_optimizer.READ.values() for key in keys),
    "weight_decay", "beta1", "beta2", "beta3", "eps", "eps2", "decouple", "stochastic_rounding", "fused",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "probes"), [("STABLE_DIFFUSION_XL_10_BASE", PROBES), ("FLUX_DEV_1", (True, 0.5, "x"))]
)
def test_any_value_of_any_key_has_an_outcome(model: str, probes: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    small = {**SMALL, **NO_TEXT, "model_type": model}
    keys = [key for key in keys_of(table_of("onetrainer").row) if key != "prior.model_name"]
    keys += [f"optimizer.{key}" for key in sorted(OPTIMIZER_KEYS)]
    for probe in probes:
        # a file for each quarter of the keys: most of them do not depend on each other
        for first in range(4):
            config: dict[str, Any] = small
            for key in keys[first::4]:
                config = merged(config, nested(key, probe))
            for key in sorted(CONCEPT_KEYS)[first::4]:
                config = merged(config, {"concepts": [{"path": "images", "enabled": True}]})
                config["concepts"][0] |= nested(key, probe)
            path.write_text(json.dumps(config), encoding="utf-8")
            check_outcomes([path])


OURS = {
    "ADAM": "adamw", "ADAMW_ADV": "adamw", "LION_ADV": "lion", "MUON_ADV": "muon", "ADAFACTOR": "adafactor",
    "CAME": "came", "LION_8BIT": "lion", "SCHEDULE_FREE_ADAMW": "adamw_schedule_free",
    "PRODIGY_PLUS_SCHEDULE_FREE": "prodigy_schedule_free", "DADAPT_ADAM": "dadapt_adam", "MUON": "muon",
    "ADAM_8BIT": "adamw_8bit", "PRODIGY_ADV": "prodigy",
}  # fmt: skip


@pytest.mark.parametrize(("name", "ours"), OURS.items())
def test_optimizers(name: str, ours: str, tmp_path: Path) -> None:
    found = of(tmp_path, optimizer={"optimizer": name, "weight_decay": 0.02, "eps": 1e-9, "momentum": 0.9, "d0": 1e-5})
    values = values_of(found)
    assert (values["optim.optimizer"], values["optim.weight_decay"]) == (ours, 0.02)
    assert outcome_of(found, "optimizer.momentum") == ("taken" if ours == "muon" else "not-needed")
    assert outcome_of(of(tmp_path, optimizer={"optimizer": name, "use_atan2": True}), "optimizer.use_atan2") != "taken"


def test_an_optimizer_that_lora_rocm_does_not_have(tmp_path: Path) -> None:
    found = of(tmp_path, learning_rate=1.0, optimizer={"optimizer": "SGD", "momentum": 0.9})
    assert outcome_of(found, "optimizer.optimizer") == "unsupported"
    assert outcome_of(found, "learning_rate") == "unsupported"
    assert values_of(found)["optim.learning_rate"] == 1e-4


# defaults


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    found = of(tmp_path, text_encoder={}, text_encoder_2={"train": True})
    values = values_of(found)
    own = {key: values[key] for key in ("lora.rank", "lora.alpha", "lora.train_text_encoder", "optim.learning_rate")}
    assert own == {
        "lora.rank": 16, "lora.alpha": 1, "lora.train_text_encoder": True, "optim.learning_rate": 3e-6,
    }  # fmt: skip
    assert values["optim.lr_warmup_steps"] == 200
    assert values["train.epochs"] == 100
    assert values["train.mixed_precision"] == "fp16"
    assert values["data.resolution"] == 512
    assert values["output.dtype"] == "fp32"
    assert values["lora.targets"] == ".*"
    stops = [row for row in found.outcomes if row.setting.key == "text_encoder.stop_training_after"]
    assert [row.outcome for row in stops] == ["unsupported"]  # after 30 of 100 epochs


def test_a_training_of_all_weights_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "STABLE_DIFFUSION_15", "base_model_name": "base"}), encoding="utf-8")
    found = import_files([path])
    assert outcome_of(found, "training_method") == "unsupported"
    assert values_of(found)["model.family"] == "sd15"
    assert values_of(found)["data.bucket_step"] == 8


# files


def test_a_base_of_another_family_is_refused(tmp_path: Path) -> None:
    for name in (*onetrainer.OTHER_BASES, "NEW_MODEL"):
        with pytest.raises(UserError) as caught:
            of(tmp_path, model_type=name)
        assert caught.value.code == "import-family"


@pytest.mark.parametrize(("name", "family"), onetrainer.FAMILIES.items())
def test_families(name: str, family: str, tmp_path: Path) -> None:
    assert values_of(of(tmp_path, model_type=name))["model.family"] == family


def test_a_newer_format_is_reported(tmp_path: Path) -> None:
    assert outcome_of(of(tmp_path, __version=12), "__version") == "unsupported"
    assert not of(tmp_path, __version=12).loses_something
    assert outcome_of(of(tmp_path, __version=3), "__version") == "not-needed"


def test_names_of_older_versions(tmp_path: Path) -> None:
    old = {"optimizer": "ADAMW", "optimizer_beta1": 0.8, "min_snr_gamma": 3, "lora_layer_preset": "attn-mlp"}
    found = of(tmp_path, __version=0, **old, train_unet=True, unet_learning_rate=2e-4, noising_weight=5.0)
    values = values_of(found)
    assert values["optim.betas"] == [0.8, 0.999]
    assert values["objective.min_snr_gamma"] == 3
    assert values["lora.targets"] == "attention-mlp"
    assert values["optim.learning_rate"] == 2e-4
    assert outcome_of(found, "timestep_distribution") == "unsupported"
    flux = of(tmp_path, __version=8, model_type="FLUX_DEV_1", prior={"weight_dtype": "NFLOAT_4"})
    assert values_of(flux)["model.quantization"] == "nf4"


def test_concepts_alone_are_no_configuration() -> None:
    with pytest.raises(UserError) as caught:
        import_files([FOLDER / "concepts.json"])
    assert caught.value.code == "import-unknown"


def test_concepts_and_samples_as_files_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **NO_TEXT}), encoding="utf-8")
    found = import_files([path, FOLDER / "concepts.json", FOLDER / "samples.json"])
    values = values_of(found)
    assert values["data.sources[0].path"] == "D:/images/cat"
    assert values["sample.prompts[0].prompt"] == "a cat"
    assert values["data.caption_variants"] == 8  # no text encoder is trained, so captions are cached


def test_a_file_that_is_not_here_is_listed(tmp_path: Path) -> None:
    found = of(tmp_path, concept_file_name="gone/concepts.json")
    assert [part.line for part in found.unread] == [1]
    assert found.loses_something
    assert "data.path" in values_of(found)


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = (FOLDER / "sdxl.json").read_text(encoding="utf-8")
    path.write_text(text[: text.index('"timestep_distribution"')] + "\n}{", encoding="utf-8")
    found = import_files([path])
    assert found.unread
    assert values_of(found)["lora.rank"] == 16  # its line is gone
    assert values_of(found)["train.epochs"] == 10


def test_options_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **NO_TEXT, "lora_rank": 8}), encoding="utf-8")
    found = import_files([path], ["lora_rank=64", "optimizer.optimizer=LION"])
    assert values_of(found)["lora.rank"] == 64
    assert values_of(found)["optim.optimizer"] == "lion"


def test_an_unknown_key_is_lost(tmp_path: Path) -> None:
    row = row_of(of(tmp_path, warp_drive=3), "warp_drive")
    assert (row.outcome, row.changes_weights, row.setting.line) == ("unsupported", True, 1)


def test_strict_needs_all_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **NO_TEXT, "concepts": [{"path": "images"}]}), encoding="utf-8")
    assert import_config([path], (), None).is_complete
    path.write_text(json.dumps({**SMALL, **NO_TEXT, "loss_weight_fn": "P2"}), encoding="utf-8")
    assert not import_config([path], (), None).is_complete


# single conversions


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"peft_type": "LOHA", "lora_rank": 4}, "lora.type", "loha"),
        ({"peft_type": "OFT_2", "oft_block_size": 64}, "lora.rank", 64),
        ({"peft_type": "LOKR", "lokr_full_matrix": True}, "lora.rank", 2048),
        ({"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, "optim.lr_scheduler", "cosine_with_restarts"),
        (
            {"learning_rate_scheduler": "COSINE_WITH_RESTARTS", "learning_rate_cycles": 0.5},
            "optim.lr_scheduler",
            "cosine",
        ),
        ({"learning_rate_scheduler": "REX"}, "optim.lr_scheduler", "rex"),
        (
            {"learning_rate_scheduler": "ADAFACTOR", "optimizer": {"optimizer": "ADAFACTOR"}},
            "optim.relative_step",
            True,
        ),
        ({"learning_rate_warmup_steps": 1}, "optim.lr_warmup_ratio", 0.99),
        ({"ema": "CPU"}, "train.ema_decay", 0.9998),
        ({"mse_strength": 0, "mae_strength": 1}, "objective.loss_type", "l1"),
        ({"loss_weight_fn": "DEBIASED_ESTIMATION"}, "objective.debiased_estimation_loss", True),
        ({"rescale_noise_scheduler_to_zero_terminal_snr": True}, "model.prediction_type", "v_prediction"),
        ({"force_epsilon_prediction": True}, "model.prediction_type", "epsilon"),
        ({"timestep_distribution": "SIGMOID"}, "objective.timestep_sampling", "uniform"),
        ({"resolution": "1024x512"}, "data.resolution", 724),
        ({"save_every": 90, "save_every_unit": "SECOND"}, "output.save_every_minutes", 1.5),
        ({"save_after": 3, "save_after_unit": "EPOCH"}, "output.save_every_n_epochs", 3),
        ({"output_model_destination": "lora.safetensors"}, "output.name", "lora"),
        ({"output_model_format": "COMFY_LORA"}, "output.formats", ["kohya"]),
        ({"layer_filter_preset": "attn-only"}, "lora.targets", "attention"),
        ({"layer_filter": "attn.$", "layer_filter_regex": True}, "lora.targets", [".*(attn.$).*"]),
        ({"lora_weight_dtype": "BFLOAT_16"}, "optim.optimizer", "adamw_bf16"),
    ],
)
def test_conversions(keys: dict[str, Any], ours: str, value: Any, tmp_path: Path) -> None:
    assert values_of(of(tmp_path, **keys))[ours] == value


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (
            {"learning_rate_scheduler": "CUSTOM", "custom_learning_rate_scheduler": "a.B"},
            "custom_learning_rate_scheduler",
        ),
        ({"timestep_distribution": "BETA", "noising_weight": 0.5}, "timestep_distribution"),
        ({"timestep_shift": 2.0}, "timestep_shift"),
        ({"offset_noise_weight": 0.1, "generalized_offset_noise": True}, "generalized_offset_noise"),
        ({"masked_prior_preservation_weight": 0.5}, "masked_prior_preservation_weight"),
        ({"text_encoder": {"train": True}}, "text_encoder.train"),
        ({"unet": {"train": False}}, "unet.train"),
        ({"unet": {"stop_training_after": 3, "stop_training_after_unit": "EPOCH"}}, "unet.stop_training_after"),
        ({"unet": {"model_name": "other"}}, "unet.model_name"),
        ({"text_encoder_layer_skip": 1}, "text_encoder_layer_skip"),
        ({"text_encoder": {"train": False, "dropout_probability": 0.1}}, "text_encoder.dropout_probability"),
        ({"output_model_format": "ORIGINAL_LORA"}, "output_model_format"),
        ({"validation": True}, "validation"),
        ({"optimizer": {"optimizer": "ADAMW", "amsgrad": True}}, "optimizer.amsgrad"),
    ],
)
def test_lost_settings(keys: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert outcome_of(of(tmp_path, **keys), key) == "unsupported"


def test_flow_models_have_a_shift(tmp_path: Path) -> None:
    found = of(tmp_path, model_type="ANIMA", dynamic_timestep_shifting=False)
    assert values_of(found)["objective.shift"] == 1
    assert values_of(found)["lora.targets"] == ".*"
    assert values_of(of(tmp_path, model_type="ANIMA", layer_filter_preset="blocks"))["lora.targets"] == "all-linear"


def test_samples_have_the_defaults_of_the_model(tmp_path: Path) -> None:
    values = values_of(of(tmp_path, samples=[{"prompt": "a cat", "random_seed": True, "noise_scheduler": "DPMPP_SDE"}]))
    own = {key: value for key, value in values.items() if key.startswith("sample.")}
    assert own == {
        "sample.prompts": ["a cat"], "sample.width": 1024, "sample.height": 1024, "sample.steps": 30,
        "sample.guidance_scale": 7.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "key", "outcome"),
    [
        ({"balancing": 0.5}, "balancing", "unsupported"),
        ({"balancing": 20, "balancing_strategy": "SAMPLES"}, "balancing", "unsupported"),
        ({"balancing": 1.5}, "balancing", "changed"),
        ({"type": "PRIOR_PREDICTION"}, "type", "unsupported"),
        ({"image": {"enable_fixed_flip": True}}, "image.enable_fixed_flip", "unsupported"),
        ({"text": {"enable_tag_shuffling": True, "tag_delimiter": ";"}}, "text.tag_delimiter", "unsupported"),
        (
            {"text": {"tag_dropout_enable": True, "tag_dropout_probability": 0.1}},
            "text.tag_dropout_probability",
            "unsupported",
        ),
        ({"text": {"caps_randomize_enable": True}}, "text.caps_randomize_enable", "unsupported"),
        ({"text": {"keep_tags_count": 3}}, "text.keep_tags_count", "not-needed"),
        ({"concept_stats": {"image_count": 3}}, "concept_stats.image_count", "not-needed"),
    ],
)
def test_concepts(keys: dict[str, Any], key: str, outcome: str, tmp_path: Path) -> None:
    assert outcome_of(concept_of(tmp_path, **keys), f"concepts[0].{key}") == outcome


def test_no_default_is_lost_where_the_file_has_its_key() -> None:
    path = FOLDER / "flux.json"
    lost = [row for row in translated([path]).outcomes if row.outcome == "unsupported" and row.setting.is_default]
    assert lost == []
