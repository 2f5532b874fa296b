"""Decides which recipe keys a fork of a run may change, and explains why the others stay.

A fork continues from a checkpoint. A resume refuses all keys that ``comparison.fixed_values`` returns. Most of them
decide the shape or the meaning of the saved state. The others only affect later updates, so a fork may change them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_rocm.errors import Problem
from lora_rocm.recipe.comparison import resume_differences
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.schema import Recipe

OF_LATER_UPDATES = frozenset({
    *(f"optim.{name}" for name in OptimSection.model_fields if name != "optimizer"),
    *(f"lora.{name}" for name in ("dropout", "rank_dropout", "module_dropout", "scale_weight_norms")),
    *(f"objective.{name}" for name in (
        "timestep_sampling", "logit_mean", "logit_std", "min_timestep", "max_timestep", "shift", "loss_type",
        "huber_schedule", "huber_c", "huber_scale", "noise_offset", "adaptive_noise_scale",
        "multires_noise_iterations", "multires_noise_discount", "ip_noise_gamma", "min_snr_gamma",
        "soft_min_snr_gamma", "debiased_estimation_loss", "v_pred_like_loss", "scale_v_pred_loss_like_noise_pred",
        "beta", "label_smoothing",
    )),
})  # fmt: skip
"""Keys that a resume must not change, but that a fork may change: the saved state does not depend on them."""

WHY_FIXED: Mapping[str, str] = {
    "model": "The checkpoint's weights were trained on this base model.",
    "data": "The checkpoint counts its position in this order of samples.",
    "lora": "It decides the shape or the meaning of the trained weights.",
    "optim": "The optimizer's state was computed with it.",
    "objective": "It decides what the model learns, or how the data are read.",
    "train.seed": "The order of samples and their noise depend on it.",
    "train.batch_size": "The checkpoint counts its position in updates of this size.",
    "train.gradient_accumulation_steps": "The checkpoint counts its position in updates of this size.",
    "train.mixed_precision": "The saved loss scale and rounding depend on it.",
    "train.ema_decay": "The saved moving average was computed with it.",
}
"""By section or key, why a fork cannot change it. Keys of other sections may change even on resume."""


def why_fixed(key: str) -> str:
    """Return why a fork cannot change a key, as a sentence; empty if it can."""
    if key in OF_LATER_UPDATES:
        return ""
    return WHY_FIXED.get(key) or WHY_FIXED.get(key.partition(".")[0], "")


def fork_problems(old: Recipe, new: Recipe) -> list[Problem]:
    """Return one problem for each changed key that a fork cannot change, with the reason as its ``fix``."""
    return [
        Problem(each.where, each.what, why_fixed(each.where) or "A resume must not change it either.")
        for each in resume_differences(old, new)
        if each.where not in OF_LATER_UPDATES
    ]
