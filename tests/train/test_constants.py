"""Constants that stay in memory for a run are under the canary: a changed bit ends it before anything is written."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.device.constants import changed_constants, constant, is_constant
from lora_rocm.errors import CanaryError
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.loop import Trainer
from tests.tiny_models import RUN_TARGETS
from tests.train.runs import make_recipe, material, start
from tests.train.test_guard import after_step

__all__ = ["material"]


def recipe_of(material: Path, **sections: Any) -> Recipe:
    train = {"max_train_steps": 4, "gradient_accumulation_steps": 1}
    output = {"save_every_n_steps": 2, "keep_last": 9}
    return make_recipe(material, train=train, output=output, **sections)


def flipped(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.int32)[tensor.numel() // 2] ^= 1


PLACES: dict[str, Callable[[Trainer], Tensor]] = {
    "noise schedule": lambda trainer: trainer.family.objective.schedule.alphas_cumprod_T,  # type: ignore[attr-defined]
    "scale of the latents": lambda trainer: trainer.family.latents.scale_C,  # type: ignore[attr-defined]
    "code book of adamw_8bit": lambda trainer: trainer.optimizer.rule._second._values_C,  # type: ignore[attr-defined]
    "edges of the code book": lambda trainer: trainer.optimizer.rule._first._edges_C,  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", PLACES)
def test_a_bit_of_a_constant_is_seen_before_the_next_checkpoint(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found: list[Tensor] = []

    def act(trainer: Trainer) -> None:
        found.append(PLACES[name](trainer))
        flipped(found[0])

    after_step(monkeypatch, 3, act)
    try:
        with pytest.raises(CanaryError) as caught:
            start(recipe_of(material, optim={"optimizer": "adamw_8bit"}), tmp_path / "run")
    finally:
        flipped(found[0])  # it may outlive this test
    assert caught.value.code == "canary-weights" and name in caught.value.where
    assert [updates for updates, _ in RunDir(tmp_path / "run").list_checkpoints()] == [2]


def test_a_constant_that_is_freed_is_forgotten() -> None:
    kept = constant(torch.arange(5.0), "kept")
    gone = constant(torch.arange(7.0), "gone")
    gone[0] = 9
    assert changed_constants() == ["gone"] and is_constant(kept) and not is_constant(gone.clone())
    del gone
    gc.collect()
    assert changed_constants() == []


ALLOWED = {
    ("StateGuard", ""): "its own fingerprints and verdicts: another bit in them ends the run",
    ("DeviceTransfer", ""): "its verdict, and what it sent: that is compared",
    ("FlatWeights", ""): "gradients and the memory where they land: written anew for each update",
    ("Prodigy", "._effective_rate"): "a value of the log, written in each step",
    ("_Factors", "._flat_N"): "drawn anew before each pass",
    ("_Factors", ".of_layer"): "views of what is drawn anew before each pass",
}
"""(class, attribute) -> why its tensors need no guard."""


def inside(value: object) -> Mapping[str, object]:
    """The contents of an object of ours, a container or a function, by attribute, key or cell."""
    if isinstance(value, Mapping):
        return {f"[{key!r:.40}]": each for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return {f"[{number}]": each for number, each in enumerate(value)}
    if isinstance(value, MethodType):
        return {"": value.__self__}
    if isinstance(value, partial):
        return {"()": [value.func, *value.args, *value.keywords.values()]}
    if isinstance(value, FunctionType):
        return {"()": [cell.cell_contents for cell in value.__closure__ or ()]}
    if not type(value).__module__.startswith("lora_rocm") and not isinstance(value, nn.Module):
        return {}
    slots = [slot for cls in type(value).__mro__ for slot in getattr(cls, "__slots__", ()) if hasattr(value, slot)]
    return {**getattr(value, "__dict__", {}), **{slot: getattr(value, slot) for slot in slots}}


def tensors_of(root: object) -> Iterator[tuple[str, str, Tensor]]:
    """(class of the owner, place, tensor) of every tensor that is reached from an object."""
    seen, waiting = set[int](), [("", "", root)]
    while waiting:
        owner, place, value = waiting.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield owner, place, value
            continue
        is_ours = type(value).__module__.startswith("lora_rocm") or isinstance(value, nn.Module)
        name = type(value).__name__ if is_ours else owner
        waiting += [(name, f"{place}.{key}", each) for key, each in inside(value).items()]


def unguarded(trainer: Trainer) -> list[str]:
    """Places of tensors that training reads again and again, and that neither canary nor state guard compares."""
    optimizer = trainer.optimizer
    assert isinstance(optimizer, GatedOptimizer)
    guarded = {words.untyped_storage().data_ptr() for words in optimizer.state_guard._words}
    guarded |= {tensor.untyped_storage().data_ptr() for tensor in trainer.model.placement.on_device().values()}
    found = []
    for owner, place, tensor in tensors_of(trainer):
        known = tensor.is_meta or not tensor.numel() or tensor.untyped_storage().data_ptr() in guarded
        allowed = any(owner == name and attribute in place for name, attribute in ALLOWED)
        if not known and not is_constant(tensor) and not allowed:
            found.append(f"{owner} {place} {tuple(tensor.shape)}")
    return found


RECIPES: dict[str, dict[str, Any]] = {
    "dropout, norm limit": {
        "optim": {"optimizer": "prodigy", "learning_rate": 1.0},
        "lora": {"rank": 2, "targets": RUN_TARGETS, "rank_dropout": 0.1, "scale_weight_norms": 1.0},
    },
    "adamw_8bit": {"optim": {"optimizer": "adamw_8bit"}, "model": {"quantization": "nf4"}},
}


def kept_unguarded(material: Path, folder: Path, name: str) -> list[str]:
    found: list[str] = []
    sections = {**RECIPES[name]}
    sections["model"] = {"name_or_path": str(material / "model"), **sections.get("model", {})}
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 3, lambda trainer: found.extend(unguarded(trainer)))
        start(recipe_of(material, **sections), folder / "run")
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_whatever_a_run_keeps_is_guarded(material: Path, tmp_path: Path, name: str) -> None:
    """A tensor of another kind has to be registered (``device.constants``), or ``ALLOWED`` gives the reason why not."""
    assert kept_unguarded(material, tmp_path, name) == []


@pytest.mark.parametrize(("module", "owner"), [
    ("lora_rocm.optim.adamw_8bit", "QuantisedMoment"), ("lora_rocm.families.objectives.ddpm", "NoiseSchedule"),
    ("lora_rocm.families.objectives.base", "LatentSpace"),
])  # fmt: skip
def test_a_constant_that_is_not_registered_is_found(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, owner: str
) -> None:
    """The control."""
    monkeypatch.setattr(f"{module}.constant", lambda tensor, name: tensor)
    assert any(place.startswith(owner) for place in kept_unguarded(material, tmp_path, "adamw_8bit"))
