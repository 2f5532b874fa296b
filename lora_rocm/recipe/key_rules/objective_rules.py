"""Rules about the keys of ``objective`` that several families share. A family's own rules are in its ``spec.py``."""

from __future__ import annotations

from lora_rocm.recipe.rule import RecipeRule, no_effect, not_both

RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        "timesteps-are-a-range",
        ("objective.min_timestep", "objective.max_timestep"),
        lambda least, most: least >= most,
        "min_timestep {0} is not below max_timestep {1}",
        "Lower min_timestep, or raise max_timestep.",
    ),
    *(
        no_effect(
            f"objective.{name}",
            ("objective.timestep_sampling",),
            lambda sampling: sampling == "uniform",
            "with timestep_sampling: uniform",
            "Remove it, or set timestep_sampling: logit-normal.",
        )
        for name in ("logit_mean", "logit_std")
    ),
    *(
        no_effect(
            f"objective.{name}",
            ("objective.loss_type",),
            lambda loss: loss in ("l2", "l1"),
            "with loss_type: {1}",
            "Remove it, or set loss_type: huber or smooth_l1.",
        )
        for name in ("huber_schedule", "huber_c", "huber_scale")
    ),
    no_effect(
        "objective.huber_scale",
        ("objective.huber_schedule", "objective.loss_type"),
        lambda schedule, loss: schedule == "snr" and loss not in ("l2", "l1"),
        "with huber_schedule: snr",
        "Remove it, or set huber_schedule: constant or exponential.",
    ),
    no_effect(
        "objective.adaptive_noise_scale",
        ("objective.noise_offset",),
        lambda offset: not offset,
        "without noise_offset",
        "Remove it, or set noise_offset.",
    ),
    no_effect(
        "objective.multires_noise_discount",
        ("objective.multires_noise_iterations",),
        lambda iterations: not iterations,
        "without multires_noise_iterations",
        "Remove it, or set multires_noise_iterations.",
    ),
    not_both("objective.min_snr_gamma", "objective.soft_min_snr_gamma"),
)
