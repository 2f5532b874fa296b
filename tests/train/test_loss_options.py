"""A whole run with many options of noise and loss at once resumes to the byte, and is another one without them."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.recipe.schema import Recipe
from tests.train.test_pipeline import bytes_of, losses_of, make_recipe, material, rewound, start

__all__ = ["material"]

OBJECTIVE = {
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
}


def recipe_of(material: Path, steps: int = 2, **objective: object) -> Recipe:
    images = str(material / "images")
    sources = [{"path": images, "exclude": ["bild 3*"], "loss_weight": 0.5}, {"path": images, "is_reg": True}]
    data = {"path": None, "sources": sources, "prior_loss_weight": 0.7}
    train = {"max_train_steps": steps, "gradient_accumulation_steps": 1}
    return make_recipe(material, data=data, train=train, objective=objective, output={"save_every_n_steps": 1})


def test_a_run_with_many_options_resumes_to_the_byte(material: Path, tmp_path: Path) -> None:
    recipe = recipe_of(material, **OBJECTIVE)
    assert start(recipe, tmp_path / "straight")
    rewound(tmp_path / "straight", tmp_path / "stopped", 1)
    assert start(recipe, tmp_path / "stopped")
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "straight")
    assert start(recipe_of(material, steps=1), tmp_path / "plain")
    assert losses_of(tmp_path / "plain") != losses_of(tmp_path / "straight")[:1], "the control"
