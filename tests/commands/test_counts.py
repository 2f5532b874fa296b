"""Counts that are kept in a process: which changes of a recipe need a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import counts as counts_module
from lora_rocm.commands.counts import Counts
from lora_rocm.model_files.hub_cache import hub_cache
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.this_machine import situation_here

RECIPE = """
model: {family: sdxl, name_or_path: model.safetensors}
data: {path: images}
train: {max_train_steps: 40}
"""
SAME = (
    "train.batch_size=8",
    "train.gradient_accumulation_steps=4",
    "train.max_train_steps=7",
    "train.seed=9",
    "optim.learning_rate=0.5",
    "optim.weight_decay=0.5",
    "lora.alpha=3",
    "runtime.memory=offload",
    "runtime.graphs=off",
    "sample.prompts=[a cat]",
    "output.name=other",
)
OTHER = ("lora.rank=8", "data.resolution=512", "optim.optimizer=lion", "train.ema_decay=0.9", "lora.targets=attention")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def recipe(path: Path, *overrides: str) -> Recipe:
    return load_recipe(path, overrides).recipe


def test_only_what_a_count_depends_on_is_counted_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(counts_module, "counted_in_child", lambda recipe, *_: asked.append(recipe) or len(asked))
    counts, first = Counts(), recipe(path)
    situation = situation_here(first)
    number: Any = counts(first, situation, True)
    assert number == 1 and counts.knows(first, situation, True) and not counts.knows(first, situation, False)
    for override in SAME:
        assert counts(recipe(path, override), situation, True) == 1, override
    for override in OTHER:
        asked.clear()
        counts(recipe(path, override), situation, True)
        assert len(asked) == 1, override
    (path.parent / "model.safetensors").write_bytes(b"another")
    assert not counts.knows(first, situation, True)


@pytest.mark.slow
def test_a_count_is_the_same_after_these_changes(path: Path) -> None:
    """All keys that a count does not depend on, changed at once."""
    from lora_rocm.children.plan import _counted
    from lora_rocm.hardware.settings import Settings

    tiny = ("model.name_or_path=builtin:tiny-sdxl", "data.resolution=64", "lora.rank=4")
    found = [_counted(recipe(path, *tiny, *more), Settings(), True, True) for more in ((), SAME)]
    assert found[0] == found[1]
    assert found[0] != _counted(recipe(path, *tiny, "lora.rank=8"), Settings(), True, True), "the control"


def test_the_folder_of_the_hub_follows_its_variables(tmp_path: Path) -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a b", "HF_HOME": "/c"}) == Path("/a b")
    assert hub_cache({"HF_HOME": "/c"}) == Path("/c/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/d"}) == Path("/d/huggingface/hub")
