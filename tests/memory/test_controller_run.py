"""Whole runs with less kept in memory: the same file, to the byte; previews, stops and resumes included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.families.base import ModelFamily
from lora_rocm.memory import manager
from lora_rocm.memory.footprint import counted
from lora_rocm.memory.manager import MemoryManager, choose_from
from lora_rocm.planning import step_plan
from lora_rocm.planning.step_plan import StepRequirements, activation_bytes, resident_bytes
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import load_model
from tests.event_lines import read_events
from tests.tiny_models import FEW_TARGETS
from tests.train.runs import bytes_of, make_recipe, material, rewound, start
from tests.wording import says

__all__ = ["material"]  # the fixture
SECTIONS: dict[str, dict[str, Any]] = {
    "lora": {"targets": FEW_TARGETS},
    "train": {"max_train_steps": 2, "gradient_accumulation_steps": 1},
    "sample": {"prompts": ("zibu",), "steps": 1, "width": 32, "height": 32},
    "output": {"save_every_n_steps": 1},
}


pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def images(run_dir: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run_dir / "samples").rglob("*.png"))]


def test_what_is_kept_changes_no_byte_nor_does_a_change_on_the_way(material: Path, tmp_path: Path) -> None:
    def recipe(way: str) -> Recipe:
        return make_recipe(material, **SECTIONS, runtime={"memory": way})

    for way in ("keep", "recompute", "attention", "inputs", "offload"):
        assert start(recipe(way), tmp_path / way)
        assert bytes_of(tmp_path / way) == bytes_of(tmp_path / "keep")
        assert images(tmp_path / way) == images(tmp_path / "keep") != []
        assert not [event for event in read_events(RunDir(tmp_path / way).events()) if event["type"] == "incident"]
    for before, way in (("keep", "offload"), ("inputs", "attention"), ("attention", "inputs")):
        changed = tmp_path / f"{before} to {way}"
        rewound(tmp_path / before, changed, 1)
        assert start(recipe(way), changed)
        assert bytes_of(changed) == bytes_of(tmp_path / "keep")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["auto", "selective", "attention", "recompute", "inputs", "offload"])
def test_on_a_gpu_every_way_trains_alike(material: Path, tmp_path: Path, mode: str) -> None:
    losses = []
    for way in ("keep", mode):
        run_dir = tmp_path / way
        assert start(
            make_recipe(material, **SECTIONS, runtime={"memory": way}), run_dir, device=torch.device("cuda", 0)
        )
        events = read_events(RunDir(run_dir).events())
        losses.append([event["loss"] for event in events if event["type"] == "step"])
        assert not [event for event in events if event["type"] == "incident"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_first_pass_that_takes_too_much_changes_the_plan_and_no_byte(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with the memory of a fake one: 40 % more is measured than was counted."""
    sections = {"lora": SECTIONS["lora"], "train": {"max_train_steps": 1, "batch_size": 1}}
    recipe = make_recipe(material, **sections)
    assert start(recipe, tmp_path / "kept")
    made: list[MemoryManager] = []

    def small(recipe: Recipe, family: ModelFamily, *how: Any, **named: Any) -> MemoryManager:
        _, dtype, settings, size, context, _ = how
        net = counted(recipe, family, dtype, settings, size, on_gpu=False)
        budget = int(resident_bytes(net, ()) + 1.2 * activation_bytes(net, ()))
        made.append(
            choose_from(recipe, net, StepRequirements(modes=("keep", "selective", "recompute")), budget, context)
        )
        return made[0]

    def peak(device: torch.device) -> int:
        plan, net = made[0].plan, made[0].footprint
        assert plan is not None and net is not None
        return int(resident_bytes(net, ()) + 1.4 * activation_bytes(net, plan.recomputed))

    monkeypatch.setattr(step_plan, "SLACK_BYTES", 0)  # a GPU's is more than all that this model takes
    monkeypatch.setattr(load_model, "decide", small)
    monkeypatch.setattr(manager, "peak_bytes", peak)
    assert start(recipe, tmp_path / "changed")
    assert made[0].plan is not None and made[0].plan.recomputed
    events = read_events(RunDir(tmp_path / "changed").events())
    assert says((event["text"] for event in events if event["type"] == "notice"), "memory/a-first-pass-took")
    assert bytes_of(tmp_path / "changed") == bytes_of(tmp_path / "kept")
