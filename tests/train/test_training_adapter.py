"""Whole runs with a training adapter: previews and results are without it, and a resume with another one is refused."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lora_rocm.adapters.attach import attach_file
from lora_rocm.adapters.training_adapter import NAME, TrainingAdapter
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import prepare
from lora_rocm.errors import ResumeError
from lora_rocm.families.base import family_for
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import preview
from lora_rocm.train.checkpoint import latest_valid
from tests.event_lines import read_events
from tests.lora_files import write_random_lora
from tests.train.runs import CPU, bytes_of, make_recipe, material, rewound, start
from tests.wording import saying

__all__ = ["material"]

LAST = 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(scope="module")
def file(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training adapter."""
    root = family_for(make_recipe(material)).skeleton("unet")
    path = tmp_path_factory.mktemp("training adapter") / "t.safetensors"
    return write_random_lora(path, "unet", root, r".*attn1\.to_[qv]|.*conv_shortcut")


def recipe_of(material: Path, **model: Any) -> Recipe:
    sides = {"width": 32, "height": 32, "steps": 1}
    return make_recipe(
        material,
        model=model,
        data={"validation_split": 0.3},
        train={"max_train_steps": LAST, "gradient_accumulation_steps": 1, "validation_every_n_steps": 1},
        sample={"prompts": ["a zibu"], **sides},
        output={"save_every_n_steps": 1, "dtype": "fp32"},
    )


@pytest.fixture(scope="module")
def recipe(material: Path, file: Path) -> Recipe:
    return recipe_of(material, training_adapter=str(file))


@pytest.fixture(scope="module")
def plain(material: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    assert start(recipe_of(material), run_dir)
    return RunDir(run_dir)


@pytest.fixture(scope="module")
def straight(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert start(recipe, run_dir)
    return RunDir(run_dir)


def preview_of(run_dir: RunDir, updates: int) -> bytes:
    return (run_dir.samples_at(updates) / "00.png").read_bytes()


def test_training_and_held_out_losses_are_with_it(straight: RunDir, plain: RunDir) -> None:
    """The first of each: before that, the runs had no steps in which to become different."""
    for kind in ("step", "validation"):
        found, without = (read_events(each.events(), kind)[0]["loss"] for each in (straight, plain))
        assert abs(found / without - 1) > 1e-3


def test_previews_and_results_are_without_it(
    recipe: Recipe, straight: RunDir, plain: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preview_of(straight, 0) == preview_of(plain, 0)
    assert load_file(straight.lora).keys() == load_file(plain.lora).keys()
    assert bytes_of(straight.path) != bytes_of(plain.path), "the control: it was trained with"
    # The last preview uses the base with the exported LoRA alone.
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    attach_file(family, model, straight.lora)
    lookup = prepare(recipe, family, Encoding(LatentCache(Path(recipe.cache.dir)), CPU)).text_lookup
    preview.draw(RunDir(tmp_path / "export").create(), LAST, family, model, recipe, lookup)
    assert differs(RunDir(tmp_path / "export"), straight) <= 2
    # With the fault another one is drawn.
    again = RunDir(Path(shutil.copytree(straight.path, tmp_path / "again")))
    shutil.rmtree(again.samples_at(LAST))
    again.result.unlink()
    monkeypatch.setattr(TrainingAdapter, "absent", lambda self: nullcontext())
    assert start(recipe, again.path) and differs(again, straight) > 2


def differs(one: RunDir, other: RunDir) -> int:
    """The largest difference of the last previews, in levels of 255."""
    pixels = [np.asarray(Image.open(each.samples_at(LAST) / "00.png")).astype(int) for each in (one, other)]
    return int(abs(pixels[0] - pixels[1]).max())


def test_a_resume_is_exact_and_refuses_another_training_adapter(
    file: Path, recipe: Recipe, straight: RunDir, plain: RunDir, tmp_path: Path
) -> None:
    run_dir = rewound(straight.path, tmp_path / "run", 1)
    before = file.read_bytes()
    tensors = load_file(file)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, file)
    with pytest.raises(
        ResumeError, check=saying("train/the-training-adapter", "train/is-not-that-of-the-checkpoint")
    ) as caught:
        start(recipe, run_dir)
    assert caught.value.code == "resume-training-adapter-changed"
    file.write_bytes(before)
    assert start(recipe, run_dir)
    assert bytes_of(run_dir) == bytes_of(straight.path)
    (own, _), (without, _) = (latest_valid(each) for each in (straight, plain))
    assert own is not None and without is not None
    seals = own.facts["base_seals"]
    assert seals.pop(f"{NAME} float32") and seals == without.facts["base_seals"], "the base is the same"
