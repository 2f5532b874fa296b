"""Random combinations of options: each trains, resumes to the byte and exports files that are loaded back.

Every number is one combination for good: a failure is repeated by its number.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from tests.train.test_pipeline import bytes_of, losses_of, make_recipe, material, rewound, start

__all__ = ["material"]

Sections = dict[str, dict[str, Any]]
COMBINATIONS, OFTEN = 30, (0, 1, 3)
FIRST_SEED = 37_000  # so that every choice is in some combination
STEPS, RESUMED_AT = 3, 1

CHOICES: dict[str, tuple[Sections, ...]] = {
    "adapter": (
        {},
        {"lora": {"use_rslora": True, "alpha": 1}},
        {"lora": {"use_dora": True, "dropout": 0.1}},
        {"lora": {"type": "lokr", "factor": 4}},
        {"lora": {"type": "loha"}},
        {"lora": {"type": "oft"}},
        {"lora": {"weight_dtype": "bf16"}},
        {"lora": {"train_text_encoder": True}, "optim": {"text_encoder_learning_rate": 1e-4}},
    ),
    "optimizer": (
        {},
        {"optim": {"optimizer": "adamw_8bit"}},
        {"optim": {"optimizer": "adamw_bf16", "rounding": "kahan"}, "lora": {"weight_dtype": "bf16"}},
        {"optim": {"optimizer": "adamw_schedule_free", "lr_scheduler": "constant"}},
        {"optim": {"optimizer": "adafactor"}},
        {"optim": {"optimizer": "came"}},
        {"optim": {"optimizer": "lion", "learning_rate": 1e-4}},
        {"optim": {"optimizer": "muon"}},
        {"optim": {"optimizer": "prodigy", "learning_rate": 1.0, "d0": 1e-3}},
        {"optim": {"optimizer": "prodigy_schedule_free", "learning_rate": 1.0, "lr_scheduler": "constant"}},
        {"optim": {"optimizer": "dadapt_adam", "learning_rate": 1.0, "d0": 1e-3}},
    ),
    "schedule": (
        {},
        {"optim": {"lr_scheduler": "constant", "lr_warmup_ratio": 0.5, "lr_warmup_steps": 0}},
        {"optim": {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 2, "lr_min_ratio": 0.1}},
        {"optim": {"lr_scheduler": "polynomial", "lr_scheduler_power": 2.0}},
        {"optim": {"lr_scheduler": "rex"}},
    ),
    "noise": (
        {},
        {"objective": {"noise_offset": 0.05, "adaptive_noise_scale": 0.01}},
        {"objective": {"multires_noise_iterations": 3, "multires_noise_discount": 0.4}},
        {"objective": {"ip_noise_gamma": 0.1}},
        {"objective": {"timestep_sampling": "logit-normal", "min_timestep": 100, "max_timestep": 900}},
    ),
    "loss": (
        {},
        {"objective": {"min_snr_gamma": 5.0}},
        {"objective": {"soft_min_snr_gamma": 4.0}},
        {"objective": {"debiased_estimation_loss": True}},
        {"objective": {"v_pred_like_loss": 0.5}},
        {"objective": {"loss_type": "huber", "huber_schedule": "snr"}},
        {"objective": {"loss_type": "smooth_l1", "huber_schedule": "exponential"}},
    ),
    "data": (
        {},
        {"data": {"shuffle_caption": True, "keep_tokens": 1, "caption_variants": 2}},
        {"data": {"caption_dropout_rate": 0.3, "flip_aug": True}},
        {"data": {"alpha_mask": True, "unmasked_weight": 0.1}},
        {"data": {"validation_split": 0.2}, "train": {"validation_every_n_steps": 2}},
        {"data": {"caption_tag_dropout_rate": 0.4, "keep_tokens": 1, "caption_suffix": "drawn"}},
        {"data": {"caption_prefix": "{a photo|a drawing} of", "enable_wildcard": True}},
        {"model": {"max_token_length": 150}, "data": {"caption_suffix": ", ".join(f"word {n}" for n in range(40))}},
    ),
    "step": (
        {},
        {"train": {"gradient_accumulation_steps": 1, "ema_decay": 0.9}},
        {"train": {"mixed_precision": "fp16"}},
        {"train": {"mixed_precision": "bf16", "gradient_checkpointing": True}},
        {"runtime": {"memory": "offload"}},
        {"model": {"quantization": "int8"}},
        {"model": {"quantization": "nf4"}, "train": {"mixed_precision": "bf16"}},
    ),
    "files": (
        {},
        {"output": {"formats": ["kohya", "peft"], "dtype": "fp32"}},
        {"output": {"formats": ["diffusers", "kohya"], "dtype": "bf16"}},
        {"output": {"formats": ["sd-scripts", "kohya"]}},
        {"output": {"formats": ["comfyui", "kohya"]}},
    ),
}
"""Sections of a recipe by the part of the program that reads them; {} is the default."""


@pytest.fixture(scope="module")
def images(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With alpha channels, for masks."""
    folder = Path(shutil.copytree(material / "images", tmp_path_factory.mktemp("combinations") / "images"))
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        image.save(path)
    return folder


def combined(number: int, material: Path, images: Path) -> Recipe:
    """The recipe of a number: the first draw of its generator that the recipe's rules allow."""
    generator = random.Random(FIRST_SEED + number)
    path = images.parent / f"{number}.yaml"
    while True:
        sections: Sections = {
            "data": {"path": str(images)},
            "train": {"max_train_steps": STEPS},
            "output": {"save_every_n_steps": 1, "keep_last": 9},
        }
        for choices in CHOICES.values():
            for name, keys in generator.choice(choices).items():
                sections[name] = {**sections.get(name, {}), **keys}
        try:
            given = make_recipe(material, **sections).model_dump(mode="json", exclude_unset=True)
            path.write_text(json.dumps(given), encoding="utf-8")
            return load_recipe(path).recipe
        except (ValidationError, RecipeError):
            continue  # the options exclude one another


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number in OFTEN else pytest.mark.slow) for number in range(COMBINATIONS)],
)
def test_a_combination_trains_resumes_to_the_byte_and_exports(
    material: Path, images: Path, tmp_path: Path, number: int
) -> None:
    recipe, straight = combined(number, material, images), tmp_path / "straight"
    assert start(recipe, straight)
    broken = rewound(straight, tmp_path / "broken", RESUMED_AT)
    first = len(losses_of(broken))
    assert start(recipe, broken)
    assert bytes_of(broken) == bytes_of(straight) and losses_of(broken)[first:] == losses_of(straight)[RESUMED_AT:]
    assert len(losses_of(straight)) == STEPS and len(set(losses_of(straight))) > 1, "a loss that is always the same"


def test_every_choice_is_made_by_some_combination(material: Path, images: Path) -> None:
    """So that a rule that excludes a choice always does not hide it."""
    made = [combined(number, material, images).model_dump(mode="json") for number in range(COMBINATIONS)]
    missing = [
        keys
        for choices in CHOICES.values()
        for sections in choices
        for name, keys in sections.items()
        if not any(
            all(as_written(recipe.get(name, {}).get(key)) == value for key, value in keys.items()) for recipe in made
        )
    ]
    assert not missing


def as_written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
