"""Whole runs of Stable Diffusion 1.x and 2.x: caches, training, export read back by diffusers, previews, resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_rocm.run.events import read_events
from lora_rocm.run.layout import RunDir
from tests.families.sd.test_family import VERSIONS
from tests.tiny_sd import SD_TARGETS, Version, write_tiny_sd
from tests.train.test_run import make_recipe, start, write_material

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
STEPS = 4


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_from_images_to_verified_files_and_a_resume_to_the_byte(version: Version, tmp_path: Path) -> None:
    material = write_material(tmp_path / "stoff")
    shutil.rmtree(material / "model")
    scheduler = {"prediction_type": "v_prediction"} if version == "sd2" else {}
    write_tiny_sd(material / "model", version, **scheduler)
    recipe = make_recipe(
        material,
        model={"family": version},
        lora={"targets": SD_TARGETS, "train_text_encoder": version == "sd15"},
        train={"max_train_steps": STEPS, "gradient_accumulation_steps": 1},
        output={"formats": ["kohya", "diffusers", "peft"]},
        sample={"prompts": ["zibu cat"], "steps": 2, "width": 64, "height": 64},
    )
    straight, stopped = RunDir(tmp_path / "straight"), RunDir(tmp_path / "stopped")
    assert start(recipe, straight.path)
    events = read_events(straight.events())
    kinds = [event["type"] for event in events]
    assert kinds.count("step") == STEPS and "export" in kinds and "error" not in kinds
    assert sorted(straight.path.rglob("*.png"))
    assert not start(recipe, stopped.path, stop_at=2)
    assert start(recipe, stopped.path)
    assert stopped.lora.read_bytes() == straight.lora.read_bytes()
