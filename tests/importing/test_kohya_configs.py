"""Whole recipes from configurations of kohya's scripts, compared with the scripts key by key (sd-scripts 48d368fa)."""

from __future__ import annotations

from lora_rocm.importing.importer import PLACEHOLDER, import_files
from tests.importing.imported import CONFIGS, outcome_of, row_of, values_of

KOHYA = CONFIGS / "kohya"


def test_a_preset_of_the_gui() -> None:
    assert values_of(import_files([KOHYA / "gui-lokr.json"])) == {
        "model.family": "sdxl",
        "model.name_or_path": PLACEHOLDER,
        "model.max_token_length": 75,
        "data.path": PLACEHOLDER,
        "data.resolution": 1024,
        "data.caption_extension": ".txt",
        "data.caption_fallback": "folder",
        "data.bucket_step": 64,
        "data.bucket_max_aspect": 100.0,
        "data.enable_bucket": True,
        "data.upscale": False,
        "lora.type": "lokr",
        "lora.rank": 64,
        "lora.alpha": 64,
        "lora.targets": "attention-mlp-conv",
        "lora.train_text_encoder": True,
        "lora.factor": -1,
        "lora.module_dropout": 0.1,
        "lora.rank_dropout": 0.1,
        "optim.optimizer": "prodigy",
        "optim.learning_rate": 1.0,
        "optim.weight_decay": 0.0,
        "optim.lr_scheduler": "constant",
        "objective.min_snr_gamma": 10.0,
        "objective.multires_noise_discount": 0.2,
        "objective.multires_noise_iterations": 8,
        "train.epochs": 20,
        "train.batch_size": 8,
        "train.gradient_accumulation_steps": 1,
        "train.seed": 12345,
        "train.mixed_precision": "bf16",
        "train.gradient_checkpointing": True,
        "output.save_every_n_epochs": 1,
        "output.dtype": "fp16",
    }


def test_a_configuration_with_its_dataset_and_prompts() -> None:
    found = import_files([KOHYA / "train.toml"])
    assert values_of(found) == {
        "model.family": "sdxl",
        "model.name_or_path": "/models/illustrious.safetensors",
        "model.vae": "/models/sdxl_vae.safetensors",
        "model.max_token_length": 150,
        "data.sources[0].path": "//server/sets/zwx",
        "data.sources[0].caption_fallback": "empty",
        "data.sources[0].repeats": 10,
        "data.sources[0].shuffle_caption": True,
        "data.sources[0].resolution": 1024,
        "data.sources[0].mask_path": "masks",
        "data.sources[1].path": "reg",
        "data.sources[1].caption_fallback": "trigger",
        "data.sources[1].resolution": 1024,
        "data.sources[1].is_reg": True,
        "data.sources[1].trigger_word": "cat",
        "data.sources[2].path": "small",
        "data.sources[2].caption_fallback": "empty",
        "data.sources[2].shuffle_caption": True,
        "data.sources[2].flip_aug": True,
        "data.sources[2].resolution": 768,
        "data.sources[2].max_batch_size": 2,
        "data.caption_extension": ".txt",
        "data.keep_tokens": 1,
        "data.recursive": False,
        "data.prior_loss_weight": 0.5,
        "data.bucket_max_aspect": 100.0,
        "data.enable_bucket": True,
        "data.upscale": False,
        "data.caption_variants": 16,
        "data.normalize_masked_area_loss": False,
        "lora.rank": 16,
        "lora.alpha": 8,
        "lora.dropout": 0.1,
        "lora.targets": "attention-mlp-conv",
        "lora.train_text_encoder": True,
        "lora.overrides[0].match": r"text_encoder_2\..*",
        "lora.overrides[0].learning_rate": 2e-05,
        "lora.conv_rank": 8,
        "lora.conv_alpha": 4,
        "lora.loraplus_lr_ratio": 16.0,
        "lora.rank_dropout": 0.1,
        "optim.optimizer": "adafactor",
        "optim.learning_rate": 0.0001,
        "optim.text_encoder_learning_rate": 5e-05,
        "optim.weight_decay": 0.0,
        "optim.lr_scheduler": "cosine",
        "optim.lr_min_ratio": 0.1,
        "optim.lr_warmup_steps": 240,
        "optim.lr_warmup_from_zero": True,
        "optim.optimizer_args": ["relative_step=False", "scale_parameter=False", "warmup_init=False"],
        "objective.min_snr_gamma": 5.0,
        "objective.noise_offset": 0.05,
        "objective.zero_terminal_snr": True,
        "objective.loss_type": "huber",
        "objective.huber_c": 0.2,
        "train.max_train_steps": 2400,
        "train.batch_size": 4,
        "train.gradient_accumulation_steps": 2,
        "train.seed": 7,
        "train.mixed_precision": "bf16",
        "train.gradient_checkpointing": True,
        "sample.every_n_steps": 100,
        "sample.prompts": [line for line in (KOHYA / "prompts.txt").read_text("utf-8").splitlines() if line[0] != "#"],
        "sample.sampler": "euler_a",
        "output.name": "two",
        "output.dir": "/out",
        "output.save_every_n_steps": 100,
        "output.keep_last_loras": 3,
        "output.dtype": "fp16",
        "output.log_with": ["wandb"],
    }
    lost = {row.setting.key for row in found.outcomes if row.outcome == "unsupported"}
    assert lost == {"network_args.a_new_argument", "datasets[1].subsets[0].caption_dropout_every_n_epochs"}
    assert outcome_of(found, "clip_skip") == "not-needed" and row_of(found, "wandb_api_key").setting.shown == "***"
    assert row_of(found, "datasets[1].resolution").setting.where.endswith("dataset.toml:24")


def test_a_batch_file_for_a_flow_model() -> None:
    found = import_files([KOHYA / "anima.bat"])
    assert values_of(found) == {
        "model.family": "anima",
        "model.name_or_path": "C:/models/anima.safetensors",
        "model.text_encoder": "C:/models/qwen3.safetensors",
        "model.vae": "C:/models/vae.safetensors",
        "data.path": "D:/sets/zwx",
        "data.resolution": 1024,
        "data.caption_extension": ".caption",
        "data.caption_fallback": "folder",
        "data.bucket_step": 16,
        "data.bucket_max_aspect": 4.0,
        "data.enable_bucket": True,
        "data.upscale": True,
        "lora.rank": 16,
        "lora.alpha": 16,
        "optim.optimizer": "prodigy",
        "optim.learning_rate": 0.0001,
        "optim.optimizer_args": ["weight_decay=0.01", "decouple=True", "d_coef=2"],
        "objective.timestep_sampling": "logit-normal",
        "objective.shift": 3,
        "objective.logit_std": 1.2,
        "train.epochs": 8,
        "train.mixed_precision": "no",
        "output.dtype": "fp32",
    }
    assert outcome_of(found, "min_snr_gamma") == "not-needed"
    assert [part.line for part in found.unread] == [10]
