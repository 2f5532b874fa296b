"""Random combinations of options: each trains, resumes to the byte and exports files that are loaded back.

Every number is one combination: a failure is repeated by its number. Each group of options deals its choices like a
pack of cards, so that each is made before one comes again.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file

from lora_rocm.device.precision import FLOATS
from lora_rocm.families.base import family_for
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from tests.lora_files import write_random_lora
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl
from tests.train.runs import bytes_of, losses_of, make_recipe, rewound, start, write_material

Sections = dict[str, dict[str, Any]]
COMBINATIONS, OFTEN = 30, 4
SEED = 37_105
STEPS, RESUMED_AT = 3, 1
PATIENCE = 20
"""Draws for one combination after which one more group also takes choices that it has dealt before."""
FOLDER = "FOLDER"
"""Stands for the folder of the test's models and images."""

CHOICES: dict[str, tuple[Sections, ...]] = {
    "adapter": (
        {},
        {"lora": {"use_rslora": True, "alpha": 1}},
        {"lora": {"use_dora": True, "dropout": 0.1}},
        {"lora": {"type": "lokr", "factor": 4}},
        {"lora": {"type": "loha"}},
        {"lora": {"type": "oft"}},
        {"lora": {"type": "ia3", "rank": 16}},  # the rank that it does not read, at its default
        {"lora": {"loraplus_lr_ratio": 4.0}},
        {"lora": {"targets": rf"{RUN_TARGETS}|.*resnets\.0\.conv1", "conv_rank": 1}},
        {"lora": {"overrides": [{"match": r"unet\..*to_q", "rank": 4, "alpha": 1.0, "learning_rate": 1e-4}]}},
        {"lora": {"rank_dropout": 0.4, "module_dropout": 0.2}},
        {"lora": {"scale_weight_norms": 0.01}},
        {"lora": {"init_from": f"{FOLDER}/start.safetensors"}},  # its rank by rank: auto
        {"lora": {"weight_dtype": "bf16"}},
        {"lora": {"train_text_encoder": True}, "optim": {"text_encoder_learning_rate": 1e-4}},
    ),
    "start": (
        {},
        {"lora": {"init": "gaussian"}},
        {"lora": {"init": "orthogonal"}},
        {"lora": {"init": "pissa"}},
        {"lora": {"init": "olora"}},
        {"lora": {"init": "eva"}},
    ),
    "beside": (
        {},
        {"lora": {"train_norms": True}},
        {
            "lora": {"new_tokens": [{"token": "<zibu>", "vectors": 2, "init": "cat"}]},
            "optim": {"embedding_until_step": 2},
        },
    ),
    "optimizer": (
        {},
        {"optim": {"optimizer": "adamw_8bit"}},
        {"optim": {"optimizer": "adamw_bf16", "rounding": "kahan"}, "lora": {"weight_dtype": "bf16"}},
        {"optim": {"optimizer": "adamw_bf16", "rounding": "stochastic"}, "lora": {"weight_dtype": "bf16"}},
        {"optim": {"optimizer": "adamw_8bit"}, "lora": {"weight_dtype": "fp16"}},
        {"optim": {"optimizer": "adamw_schedule_free", "lr_scheduler": "constant"}},
        {"optim": {"optimizer": "adafactor"}},
        {
            "optim": {"optimizer": "adafactor", "relative_step": True, "learning_rate": 1e-4, "lr_warmup_steps": 0}
            | {"lr_scheduler": "constant"}
        },
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
        {"objective": {"zero_terminal_snr": True}, "model": {"prediction_type": "v_prediction"}},
        {"objective": {"timestep_sampling": "logit-normal", "min_timestep": 100, "max_timestep": 900}},
    ),
    "loss": (
        {},
        {"objective": {"min_snr_gamma": 5.0}},
        {"objective": {"soft_min_snr_gamma": 4.0}},
        {"objective": {"debiased_estimation_loss": True}},
        {"objective": {"v_pred_like_loss": 0.5}},
        {"objective": {"loss_type": "l1"}},
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
    "images": (
        {},
        {"data": {"resolution": [64, 96]}},
        {"data": {"random_crop": 2}},
        {"data": {"color_aug": 1}},
        {"data": {"path": None, "sources": [{"path": f"{FOLDER}/table", "loss_weight_column": "weight"}]}},
        {"data": {"path": f"{FOLDER}/masked", "mask_path": "beside"}},
        {
            "data": {
                "path": None,
                "sources": [{"path": f"{FOLDER}/images"}, {"path": f"{FOLDER}/masked", "is_reg": True}],
                "prior_loss_weight": 0.5,
            }
        },
        {"model": {"name_or_path": f"{FOLDER}/inpainting"}},
        {
            "model": {"name_or_path": f"{FOLDER}/inpainting"},
            "data": {"path": f"{FOLDER}/masked", "mask_path": "beside"},
        },
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
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with alpha channels, which are masks; the same with weights in a table, and with masks for the images."""
    folder = write_material(tmp_path_factory.mktemp("combinations"))
    write_tiny_sdxl(folder / "inpainting", **{**SHALLOW, "unet": {**SHALLOW["unet"], "in_channels": 9}})
    for path in (folder / "images").glob("*.png"):
        with Image.open(path) as image:
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        image.save(path)
    for path in (folder / "images").glob("*.txt"):
        path.write_text(path.read_text(encoding="utf-8").replace("zibu", "<zibu>"), encoding="utf-8")
    for name in ("table", "masked"):
        shutil.copytree(folder / "images", folder / name)
    rows = [{"file_name": f"bild {number}.png", "weight": 0.5 + number} for number in range(5)]
    (folder / "table" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for path in sorted((folder / "masked").glob("*.png")):
        with Image.open(path) as image:
            size = image.size
        Image.linear_gradient("L").rotate(90).resize(size).save(path.with_name(f"{path.stem}-masklabel.png"))
    unet = family_for(make_recipe(folder)).skeleton("unet")
    write_random_lora(folder / "start.safetensors", "unet", unet, RUN_TARGETS)
    return folder


@cache
def combinations() -> tuple[Sections, ...]:
    """The sections of all combinations that the recipe's rules allow."""
    generator = random.Random(SEED)
    packs: dict[str, list[Sections]] = {name: [] for name in CHOICES}
    found = list[Sections]()
    for _ in range(COMBINATIONS):
        for name, pack in packs.items():
            pack.extend([] if pack else CHOICES[name])
        for draw in count():
            anew = generator.sample(list(CHOICES), min(draw // PATIENCE, len(CHOICES)))
            chosen = {name: generator.choice(CHOICES[name] if name in anew else pack) for name, pack in packs.items()}
            sections = joined(chosen.values())
            if is_allowed(sections):
                break
        for name, choice in chosen.items():
            if choice in packs[name]:
                packs[name].remove(choice)
        found.append(sections)
    return tuple(found)


def joined(chosen: Iterable[Sections]) -> Sections:
    sections: Sections = {"train": {"max_train_steps": STEPS}, "output": {"save_every_n_steps": 1, "keep_last": 9}}
    for choice in chosen:
        for name, keys in choice.items():
            sections[name] = {**sections.get(name, {}), **keys}
    return sections


def is_allowed(sections: Sections) -> bool:
    try:
        recipe = make_recipe(Path(FOLDER), **sections)
    except ValidationError:
        return False  # the options exclude one another
    return set(recipe.formats) <= set(recipe.spec.formats) & set(recipe.lora.writable_formats)


def combined(number: int, material: Path) -> Recipe:
    """The recipe of a number."""
    path = material / f"{number}.yaml"
    written = dump_recipe(make_recipe(Path(FOLDER), **combinations()[number]))
    path.write_text(written.replace(FOLDER, material.as_posix()), encoding="utf-8")
    started = ["lora.rank=auto"] if "init_from" in combinations()[number].get("lora", {}) else []
    return load_recipe(path, started).recipe


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number < OFTEN else pytest.mark.slow) for number in range(COMBINATIONS)],
)
def test_a_combination_trains_resumes_to_the_byte_and_exports(material: Path, tmp_path: Path, number: int) -> None:
    recipe, straight = combined(number, material), tmp_path / "straight"
    assert start(recipe, straight)
    kept = load_file(RunDir(straight).checkpoint(STEPS) / "adapter.safetensors")
    dtypes = {tensor.dtype for name, tensor in kept.items() if not name.endswith(("start_A", "start_B"))}
    assert dtypes == {FLOATS[recipe.lora.weight_dtype]}
    broken = rewound(straight, tmp_path / "broken", RESUMED_AT)
    first = len(losses_of(broken))
    assert start(recipe, broken)
    assert bytes_of(broken) == bytes_of(straight) and losses_of(broken)[first:] == losses_of(straight)[RESUMED_AT:]
    assert len(losses_of(straight)) == STEPS and len(set(losses_of(straight))) > 1, "a loss that is always the same"


def test_every_choice_is_made_by_some_combination() -> None:
    """So that a rule that excludes a choice always does not hide it."""
    made = combinations()
    missing = [
        choice
        for choices in CHOICES.values()
        for choice in choices
        if not any(
            all(
                sections.get(name, {}).get(key) == value for name, keys in choice.items() for key, value in keys.items()
            )
            for sections in made
        )
    ]
    assert not missing
