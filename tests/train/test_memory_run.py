"""Whole runs with less kept in memory: the same file, to the byte; previews, stops and resumes included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.recipe.schema import Recipe
from lora_rocm.run.events import read_events
from lora_rocm.run.layout import RunDir
from tests.tiny_models import FEW_TARGETS
from tests.train.test_run import bytes_of, make_recipe, material, start

__all__ = ["material"]  # the fixture
SECTIONS: dict[str, dict[str, Any]] = {
    "lora": {"targets": FEW_TARGETS},
    "train": {"max_train_steps": 3, "gradient_accumulation_steps": 1},
    "sample": {"prompts": ("zibu",), "steps": 2, "every_n_steps": 2},
}


pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def pictures(run_dir: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run_dir / "samples").rglob("*.png"))]


def test_what_is_kept_changes_no_byte_nor_does_a_change_on_the_way(material: Path, tmp_path: Path) -> None:
    def recipe(memory: str) -> Recipe:
        return make_recipe(material, **SECTIONS, runtime={"memory": memory})

    for memory in ("keep", "selective", "recompute", "offload"):
        assert start(recipe(memory), tmp_path / memory)
        assert bytes_of(tmp_path / memory) == bytes_of(tmp_path / "keep")
        assert pictures(tmp_path / memory) == pictures(tmp_path / "keep") != []
        assert not [event for event in read_events(RunDir(tmp_path / memory).events()) if event["type"] == "incident"]
    assert not start(recipe("keep"), tmp_path / "changed", stop_at=1)
    assert start(recipe("offload"), tmp_path / "changed")
    assert bytes_of(tmp_path / "changed") == bytes_of(tmp_path / "keep")


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["auto", "selective", "recompute", "offload"])
def test_on_a_gpu_every_way_trains_alike(material: Path, tmp_path: Path, memory: str) -> None:
    losses = []
    for way in ("keep", memory):
        run_dir = tmp_path / way
        assert start(
            make_recipe(material, **SECTIONS, runtime={"memory": way}), run_dir, device=torch.device("cuda", 0)
        )
        events = read_events(RunDir(run_dir).events())
        losses.append([event["loss"] for event in events if event["type"] == "step"])
        assert not [event for event in events if event["type"] == "incident"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
