"""Metadata of an exported file: kohya's ``ss_`` fields and Stability's modelspec.

Sources: kohya-ss/sd-scripts ``library/train_util.py`` (names), Stability-AI/ModelSpec 1.0.1. All values are strings.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.families.base import ModelFamily
from lora_rocm.families.objectives.flow import FlowObjective
from lora_rocm.recipe.schema import Recipe

SPEC_VERSION = "1.0.1"


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its recipe does not contain.

    steps: number of updates made.
    epochs: number of passes over the data, rounded down.
    num_images: images per epoch, including repeats.
    tag_frequency: how often each tag occurs, keyed by folder and then by tag.
    buckets: number of images, keyed by size as "WxH".
    dataset_dirs: n_repeats and img_count of each folder; for regularisation images also num_reg, their number per
        epoch.
    base_name: name of the base model.
    finished_at_s: Unix time if SOURCE_DATE_EPOCH sets it, else None, because result files contain no time of day.
    """

    steps: int
    epochs: int
    num_epochs: int
    num_images: int = 0
    tag_frequency: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    buckets: Mapping[str, int] = field(default_factory=dict)
    dataset_dirs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    base_name: str = ""
    finished_at_s: int | None = None


def ss_fields(recipe: Recipe, family: ModelFamily, facts: RunFacts, network: Mapping[str, str]) -> dict[str, str]:
    """Return the ``ss_`` metadata.

    ``network``: the adapter's ss_network_module, ss_network_dim, ss_network_alpha and ss_network_args.
    """
    optim, train, names = recipe.optim, recipe.train, recipe.spec.metadata
    # Regularisation images are counted apart from the others
    reg_dirs = {name: folder for name, folder in facts.dataset_dirs.items() if "num_reg" in folder}
    own_dirs = {name: folder for name, folder in facts.dataset_dirs.items() if name not in reg_dirs}
    num_reg_images = sum(folder["num_reg"] for folder in reg_dirs.values())
    values: dict[str, Any] = {
        **names.extra,
        "ss_base_model_version": names.base_version or None,
        **network,
        "ss_output_name": recipe.output.name,
        "ss_training_comment": recipe.output.description,
        "ss_steps": facts.steps,
        "ss_max_train_steps": train.max_train_steps or facts.steps,
        "ss_epoch": facts.epochs,
        "ss_num_epochs": facts.num_epochs,
        "ss_num_train_images": facts.num_images - num_reg_images,
        "ss_num_reg_images": num_reg_images,
        "ss_prior_loss_weight": recipe.data.prior_loss_weight if num_reg_images else None,
        "ss_total_batch_size": train.batch_size * train.gradient_accumulation_steps,
        "ss_batch_size_per_device": train.batch_size,
        "ss_gradient_accumulation_steps": train.gradient_accumulation_steps,
        "ss_gradient_checkpointing": train.gradient_checkpointing,
        "ss_learning_rate": optim.learning_rate,
        names.rate: optim.learning_rate,
        names.text_rate: optim.text_rate if any(map(recipe.trains, recipe.spec.text_components)) else None,
        "ss_optimizer": optim.description,
        "ss_lr_scheduler": optim.lr_scheduler,
        "ss_lr_warmup_steps": optim.warmup_steps(train.max_train_steps or facts.steps),
        "ss_max_grad_norm": optim.max_grad_norm,
        "ss_seed": train.seed,
        "ss_mixed_precision": train.mixed_precision,
        "ss_resolution": f"({side}, {side})" if (side := _side(recipe)) else None,
        **recipe.objective.metadata(),
        **(family.objective.kohya_fields() if isinstance(family.objective, FlowObjective) else {}),
        "ss_network_dropout": recipe.lora.dropout or None,
        "ss_caption_dropout_rate": recipe.data.caption_dropout_rate,
        "ss_shuffle_caption": recipe.data.shuffle_caption,
        "ss_keep_tokens": recipe.data.keep_tokens,
        "ss_flip_aug": recipe.data.flip_aug,
        "ss_color_aug": True if recipe.data.color_aug else None,
        "ss_enable_bucket": recipe.data.enable_bucket,
        "ss_bucket_no_upscale": not recipe.data.upscale,
        "ss_cache_latents": True,
        "ss_tag_frequency": _json(facts.tag_frequency),
        "ss_dataset_dirs": _json(own_dirs),
        "ss_reg_dataset_dirs": _json(reg_dirs) if reg_dirs else None,
        "ss_bucket_info": _json(_bucket_info(facts.buckets)),
        "ss_sd_model_name": facts.base_name,
        "ss_sd_model_hash": family.base_facts()["hash"] or None,
        **recipe.model.metadata(),
        "ss_training_finished_at": facts.finished_at_s,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def modelspec(recipe: Recipe, family: ModelFamily, facts: RunFacts, model_hash: str) -> dict[str, str]:
    """Return the ``modelspec.`` metadata. Fields without a value are omitted."""
    side, prediction = _side(recipe), family.base_facts()["prediction_type"]
    values = {
        "sai_model_spec": SPEC_VERSION,
        "architecture": recipe.spec.metadata.architecture,
        "implementation": recipe.spec.metadata.implementation,
        "title": recipe.output.name,
        "resolution": f"{side}x{side}" if side else None,
        "description": recipe.output.description,
        "author": recipe.output.author,
        "license": recipe.output.license,
        "trigger_phrase": recipe.data.trigger_word,
        "prediction_type": {"v_prediction": "v"}.get(prediction, prediction),
        "hash_sha256": f"0x{model_hash}",
        "date": _date(facts.finished_at_s),
    }
    return {f"modelspec.{name}": value for name, value in values.items() if value}


def _side(recipe: Recipe) -> int | None:
    """Largest training resolution in pixels, or None if the family has no resolution."""
    return recipe.data.largest_resolution if recipe.spec.reads("data.resolution") else None


def _bucket_info(buckets: Mapping[str, int]) -> dict[str, Any]:
    shapes = [(SampleShape.parse(name).sizes[::-1], count) for name, count in sorted(buckets.items())]  # width first
    return {"buckets": {str(i): {"resolution": shape, "count": count} for i, (shape, count) in enumerate(shapes)}}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _date(seconds: int | None) -> str:
    if seconds is None:
        return ""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
