"""A whole run with many options of noise and loss at once resumes to the byte, and is another one without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_rocm.recipe.schema import Recipe
from tests.train.runs import bytes_of, losses_of, make_recipe, material, rewound, start

__all__ = ["material"]

OF_NOISE: dict[str, dict[str, Any]] = {
    "objective": {
        "noise_offset": 0.05,
        "adaptive_noise_scale": 0.1,
        "multires_noise_iterations": 4,
        "ip_noise_gamma": 0.1,
        "timestep_sampling": "logit-normal",
        "min_timestep": 100,
        "max_timestep": 900,
        "loss_type": "huber",
        "min_snr_gamma": 5.0,
        "debiased_estimation_loss": True,
        "v_pred_like_loss": 0.5,
    },
}
OF_VELOCITY: dict[str, dict[str, Any]] = {
    "model": {"prediction_type": "v_prediction"},
    "optim": {"lr_cosine_steps": 3},
    "objective": {
        "scale_v_pred_loss_like_noise_pred": True,
        "soft_min_snr_gamma": 4.0,
        "loss_type": "smooth_l1",
        "huber_schedule": "constant",
        "huber_scale": 2.0,
        "zero_terminal_snr": True,
    },
}


def recipe_of(material: Path, steps: int = 2, **sections: dict[str, Any]) -> Recipe:
    images = str(material / "images")
    sources = [{"path": images, "exclude": ["bild 3*"], "loss_weight": 0.5}, {"path": images, "is_reg": True}]
    data = {"path": None, "sources": sources, "prior_loss_weight": 0.7}
    train = {"max_train_steps": steps, "gradient_accumulation_steps": 1}
    return make_recipe(material, data=data, train=train, output={"save_every_n_steps": 1}, **sections)


@pytest.mark.parametrize("sections", [OF_NOISE, OF_VELOCITY], ids=["noise", "velocity"])
def test_a_run_with_many_options_resumes_to_the_byte(
    material: Path, tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    recipe = recipe_of(material, **sections)
    assert start(recipe, tmp_path / "straight")
    rewound(tmp_path / "straight", tmp_path / "stopped", 1)
    assert start(recipe, tmp_path / "stopped")
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "straight")
    assert start(recipe_of(material, steps=1), tmp_path / "plain")
    assert losses_of(tmp_path / "plain") != losses_of(tmp_path / "straight")[:1], "the control"
