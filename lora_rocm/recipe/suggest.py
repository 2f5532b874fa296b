"""Did-you-mean for unknown keys: the names of other trainers, the same key elsewhere, then spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from lora_rocm.recipe.schema import DataSource, Recipe

# Names of kohya's scripts, OneTrainer, ai-toolkit, SimpleTuner, diffusers' examples, diffusion-pipe and musubi-tuner.
OTHER_NAMES: dict[str, str] = {
    # sections
    "base_model": "model.name_or_path",
    "network": "lora",
    "adapter": "lora",
    "optimizer_args": "optim",
    "datasets": "data.sources",
    "dataset": "data",
    "concepts": "data.sources",
    "subsets": "data.sources",
    "directory": "data.sources",
    "save": "output",
    "training": "train",
    "validation": "sample",
    # model
    "pretrained_model_name_or_path": "model.name_or_path",
    "base_model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "model_type": "model.family",
    "model_family": "model.family",
    "arch": "model.family",
    "vae_path": "model.vae",
    "pretrained_vae_model_name_or_path": "model.vae",
    "v_parameterization": "model.prediction_type",
    "v_pred": "model.prediction_type",
    # lora
    "network_dim": "lora.rank",
    "linear": "lora.rank",
    "lora_rank": "lora.rank",
    "dim": "lora.rank",
    "r": "lora.rank",
    "network_alpha": "lora.alpha",
    "linear_alpha": "lora.alpha",
    "lora_alpha": "lora.alpha",
    "network_dropout": "lora.dropout",
    "lora_dropout": "lora.dropout",
    "network_weights": "lora.init_from",
    "init_lora": "lora.init_from",
    "target_modules": "lora.targets",
    "lora_target": "lora.targets",
    "dora_wd": "lora.use_dora",
    "lora_decompose": "lora.use_dora",
    "lora_use_rslora": "lora.use_rslora",
    "train_te": "lora.train_text_encoder",
    # optimizer
    "lr": "optim.learning_rate",
    "unet_lr": "optim.learning_rate",
    "text_encoder_lr": "optim.text_encoder_learning_rate",
    "te_lr": "optim.text_encoder_learning_rate",
    "optimizer_type": "optim.optimizer",
    "scheduler": "optim.lr_scheduler",
    "learning_rate_scheduler": "optim.lr_scheduler",
    "lr_warmup": "optim.lr_warmup_steps",
    "warmup_steps": "optim.lr_warmup_steps",
    "learning_rate_warmup_steps": "optim.lr_warmup_steps",
    "clip_grad_norm": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "eps": "optim.epsilon",
    # train
    "train_steps": "train.max_train_steps",
    "max_steps": "train.max_train_steps",
    "max_train_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "train_batch_size": "train.batch_size",
    "micro_batch_size_per_gpu": "train.batch_size",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "snr_gamma": "train.min_snr_gamma",
    "offset_noise_weight": "train.noise_offset",
    "zero_terminal": "train.zero_terminal_snr",
    "rescale_betas_zero_snr": "train.zero_terminal_snr",
    "train_dtype": "train.mixed_precision",
    "activation_checkpointing": "train.gradient_checkpointing",
    "enable_activation_checkpointing": "train.gradient_checkpointing",
    "use_ema": "train.ema_decay",
    # data
    "train_data_dir": "data.path",
    "image_dir": "data.path",
    "image_directory": "data.path",
    "instance_data_dir": "data.path",
    "folder_path": "data.path",
    "num_repeats": "data.repeats",
    "dataset_repeats": "data.repeats",
    "balancing": "data.repeats",
    "caption_ext": "data.caption_extension",
    "include_subdirectories": "data.recursive",
    "caption_strategy": "data.caption_fallback",
    "class_tokens": "data.trigger_word",
    "instance_prompt": "data.trigger_word",
    "shuffle_tokens": "data.shuffle_caption",
    "random_flip": "data.flip_aug",
    "bucket_reso_steps": "data.bucket_step",
    "aspect_ratio_bucketing": "data.enable_bucket",
    # sample
    "sample_every_n_steps": "sample.every_n_steps",
    "sample_every": "sample.every_n_steps",
    "validation_steps": "sample.every_n_steps",
    "validation_step_interval": "sample.every_n_steps",
    "sample_prompts": "sample.prompts",
    "validation_prompt": "sample.prompts",
    "prompt": "sample.prompts",
    "neg": "sample.negative_prompt",
    "negative": "sample.negative_prompt",
    "sample_steps": "sample.steps",
    "validation_guidance": "sample.guidance_scale",
    "cfg_scale": "sample.guidance_scale",
    # cache, output, runtime
    "cache_dir": "cache.dir",
    "cache_directory": "cache.dir",
    "cache_dir_vae": "cache.dir",
    "output_dir": "output.dir",
    "output_name": "output.name",
    "save_every": "output.save_every_n_steps",
    "checkpointing_steps": "output.save_every_n_steps",
    "checkpoint_step_interval": "output.save_every_n_steps",
    "save_last_n_steps": "output.keep_last",
    "checkpoints_total_limit": "output.keep_last",
    "max_step_saves_to_keep": "output.keep_last",
    "rolling_backup_count": "output.keep_last",
    "save_precision": "output.dtype",
    "output_model_format": "output.formats",
    "max_data_loader_n_workers": "runtime.workers",
    "dataloader_num_workers": "runtime.workers",
    "num_workers": "runtime.workers",
}

# Keys of other trainers that need no counterpart, and why.
NOT_NEEDED: dict[str, str] = {
    "cache_latents": "Latents are always cached; leave it out.",
    "cache_latents_to_disk": "Latents are always cached on disk; leave it out.",
    "latent_caching": "Latents are always cached; leave it out.",
    "cache_text_encoder_outputs": "Captions are cached unless lora.train_text_encoder is on; leave it out.",
    "cache_text_embeddings": "Captions are cached unless lora.train_text_encoder is on; leave it out.",
    "xformers": "Attention is chosen by the program; leave it out.",
    "sdpa": "Attention is chosen by the program; leave it out.",
    "mem_eff_attn": "Attention is chosen by the program; leave it out.",
    "no_half_vae": "The VAE always encodes in float32; leave it out.",
    "save_state": "Every checkpoint can be resumed; leave it out.",
    "resume": "Give --resume on the command line.",
    "resume_from_checkpoint": "Give --resume on the command line.",
    "network_train_unet_only": "This is the default; lora.train_text_encoder: true is the other way.",
    "save_model_as": "Files are always .safetensors; leave it out.",
}


MAX_KEY_LETTERS = 64


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section behind an annotation: ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_class(part))), None)


def all_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every key of a recipe as ``section.key``, in schema order; the sections themselves too."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_class(field.annotation)
        if section is not None and section is not DataSource:
            yield from all_keys(section, f"{prefix}{name}.")


@cache
def _known_keys() -> tuple[str, ...]:
    return tuple(all_keys())


def suggest(name: str, siblings: list[str], section: str) -> str:
    """What the writer of the unknown key ``name`` probably wanted, as a sentence; empty when nothing is near.

    siblings: the keys that ``section`` (dotted, "" at the top) does have.
    """
    plain = name.lower().replace("-", "_")
    here = f"{section}." if section else ""
    if plain in siblings:
        return f"Did you mean {here}{plain}?"
    target = OTHER_NAMES.get(plain)
    if target is not None:
        section_of, _, leaf = target.rpartition(".")
        wanted = here + leaf if section_of == "data" and leaf in siblings else target
        return f"Did you mean {wanted}? (Other trainers call it {name}.)"
    if plain in NOT_NEEDED:
        return NOT_NEEDED[plain]
    if len(plain) > MAX_KEY_LETTERS:  # comparing long texts takes long
        return ""
    elsewhere = [key for key in _known_keys() if "." in key and key.rpartition(".")[2] == plain]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(plain, siblings, n=2, cutoff=0.7)
    if near:
        return f"Did you mean {' or '.join(here + key for key in near)}?"
    leaves = {key.rpartition(".")[2]: key for key in reversed(_known_keys())}
    far = difflib.get_close_matches(plain, leaves, n=2, cutoff=0.8)
    if far:
        return f"Did you mean {' or '.join(leaves[leaf] for leaf in far)}?"
    return f"Keys {'of ' + section if section else 'at the top'}: {', '.join(siblings)}."
