"""Ranks, alphas and learning rates that differ between modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from lora_rocm.adapters.attach import attach_file, inject, inject_on_meta
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.kinds.lora import trained_scale
from lora_rocm.adapters.targets import MATCHING_S, sections_of
from lora_rocm.errors import AdapterError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import LoadedModel, family_for
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.adapter_sections import LoraSection
from tests.lora_files import write_as_forecast
from tests.tiny_models import SHALLOW_RISING, tiny_recipe, trained, unet_output, write_tiny_sdxl
from tests.wording import saying

CPU = torch.device("cpu")
KERNEL, ONE_BY_ONE = "unet.mid_block.resnets.0.conv1", "unet.down_blocks.1.resnets.0.conv_shortcut"
QUERY, KEY = (f"unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_{part}" for part in "qk")
OVERRIDES = ({"match": r".*\.to_q", "rank": 6, "learning_rate": 5e-4}, {"match": r".*\.to_[qk]", "alpha": 1.0})
VARIED: dict[str, Any] = {
    "rank": 4,
    "alpha": 2.0,
    "conv_rank": 2,
    "overrides": OVERRIDES,
    "targets": r"mid_block\..*(to_[qk]|conv1)|.*conv_shortcut",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_RISING)


def injected(folder: Path, **lora: Any) -> Adapter:
    recipe = tiny_recipe(folder, lora={**VARIED, **lora})
    family = family_for(recipe)
    return inject(family, family.load(torch.float32, CPU), recipe.lora, 3)


def sizes(adapter: Adapter, name: str) -> tuple[int, float]:
    """(rank, scale) of a module."""
    layer = adapter.modules[name][2]
    assert len(adapter.leaves[f"{name}.lora_A"]) == layer.r["default"]
    return layer.r["default"], trained_scale(layer)


def test_each_module_has_the_rank_and_alpha_of_the_first_entry_that_matches(folder: Path) -> None:
    adapter = injected(folder)
    assert sizes(adapter, QUERY) == (6, 2 / 6), "alpha of the section"
    assert sizes(adapter, KEY) == (4, 1 / 4)
    assert sizes(adapter, KERNEL) == (2, 2 / 2)
    assert sizes(adapter, ONE_BY_ONE) == (4, 2 / 4), "no kernel"
    assert sizes(injected(folder, alpha=None), KERNEL) == (2, 1.0)
    assert sizes(injected(folder, conv_alpha=8.0), KERNEL) == (2, 4.0)


def test_the_footprint_counts_each_module_with_its_rank(folder: Path) -> None:
    recipe = tiny_recipe(folder, lora=VARIED)
    family = family_for(recipe)
    model = LoadedModel({"unet": family.skeleton("unet")}, torch.float32, torch.device("meta"))
    adapter = inject_on_meta(family, model, recipe.lora)
    shapes = {name: dense_shape(layer.get_base_layer()) for name, (_, _, layer) in adapter.modules.items()}
    sections = sections_of(recipe.lora, shapes)
    counted = sum(adapter.weights_of(sections[name], shape) for name, shape in shapes.items())
    assert counted == sum(leaf.numel() for leaf in adapter.leaves.values())
    assert "conv" in recipe.lora.ranks and "6" in recipe.lora.ranks


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_files_hold_the_rank_and_alpha_of_each_module(folder: Path, tmp_path: Path, form: str) -> None:
    family, model, adapter = trained(folder, lora=VARIED)
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": "fp32"})})
    write_as_forecast(form, tmp_path / "lora", family, adapter, recipe, RunFacts(steps=2, epochs=1, num_epochs=1))
    again = family.load(torch.float32, CPU)
    assert attach_file(family, again, tmp_path / "lora") is not None
    assert torch.allclose(unet_output(again.components["unet"]), unet_output(model.components["unet"]), atol=1e-5)
    started = injected(folder, init_from=str(tmp_path / "lora")).entries()
    for name, entry in adapter.entries().items():
        assert torch.allclose(started[name].update(), entry.update(), atol=1e-6)
    assert sizes(adapter, QUERY)[1] != sizes(adapter, KEY)[1]
    assert writers.verify(form, tmp_path / "lora", family, model, adapter).relative_difference < 1e-5
    if form == "kohya":  # diffusers ignores alphas that differ from the others
        tensors = load_file(tmp_path / "lora")
        assert len({float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}) == 1
    with pytest.raises(AdapterError, check=saying("adapters/rank-6-the-recipe-asks-for-rank")) as caught:
        injected(folder, init_from=str(tmp_path / "lora"), overrides=[{**OVERRIDES[0], "rank": 3}])
    assert "lora.overrides" in caught.value.fix and "to 6" in caught.value.fix


def test_learning_rates_of_entries_and_of_b(folder: Path) -> None:
    recipe = tiny_recipe(folder, lora={**VARIED, "loraplus_lr_ratio": 4.0}, optim={"learning_rate": 1e-4})
    adapter = injected(folder, loraplus_lr_ratio=4.0)
    groups = adapter.groups(recipe.optim, recipe.lora)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates.keys() == adapter.leaves.keys()
    assert (rates[f"{QUERY}.lora_A"], rates[f"{QUERY}.lora_B"]) == pytest.approx((5e-4, 2e-3))
    assert (rates[f"{KEY}.lora_A"], rates[f"{KEY}.lora_B"]) == pytest.approx((1e-4, 4e-4))
    plain = injected(folder, overrides=[])
    assert len(plain.groups(recipe.optim, LoraSection())) == 1, "one group, in the order of the modules"

    # AdamW's first update is the rate times the sign of the gradient
    weights = adapter.flatten(torch.float32, torch.float32, groups)
    before = adapter.state()
    optim = recipe.optim.model_copy(update={"weight_decay": 0.0, "max_grad_norm": 0.0})
    optimizer = GatedOptimizer(weights, groups, optim, max_train_steps=9, ema_decay=0.0, use_loss_scale=False)
    weights.gradients.fill_(1.0)
    optimizer.step(0, torch.zeros(()))
    for name, rate in rates.items():
        moved = before[name] - adapter.parameters[name]
        assert torch.allclose(moved, torch.full_like(moved, rate), rtol=1e-2), name


@pytest.mark.parametrize(("lora", "code", "words"), [
    ({"overrides": [{"match": r".*\.to_x", "rank": 2}]}, "overrides-match-nothing", "overrides[0].match: .*\\.to_x"),
    ({"overrides": [{"match": ".*", "rank": 2}, *OVERRIDES]}, "overrides-match-nothing", "overrides[1]"),
    ({"overrides": [{"match": "(", "rank": 2}]}, "overrides-invalid", "overrides[0]"),
    ({"targets": "attention", "overrides": []}, "conv-match-nothing", "lora.conv_rank"),
])  # fmt: skip
def test_what_matches_nothing_is_refused(folder: Path, lora: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(AdapterError) as caught:
        injected(folder, **lora)
    assert caught.value.code == code and words in caught.value.where
    if code == "overrides-match-nothing" and "to_x" in words:
        assert "to_q" in caught.value.fix or "to_k" in caught.value.fix


def test_an_entry_that_would_be_tried_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_rocm.adapters.targets.MATCHING_S", MATCHING_S / 100)
    with pytest.raises(AdapterError) as caught:
        injected(folder, overrides=[{"match": r"(\w|\w\w|\.)+[A-Z]", "rank": 2}])
    assert caught.value.code == "overrides-endless"


def test_an_entry_sets_something(folder: Path) -> None:
    with pytest.raises(ValidationError, match="sets nothing"):
        tiny_recipe(folder, lora={"overrides": [{"match": "unet.*"}]})


def test_a_state_goes_round_in_the_order_of_its_groups(folder: Path) -> None:
    def flattened(seed: float) -> tuple[Adapter, dict[str, Tensor]]:
        recipe, adapter = tiny_recipe(folder, lora=VARIED), injected(folder)
        adapter.flatten(torch.float32, torch.float32, adapter.groups(recipe.optim, recipe.lora))
        for parameter in adapter.parameters.values():
            parameter.fill_(seed)
        return adapter, adapter.state()

    _, wanted = flattened(0.5)
    other, _ = flattened(0.25)
    other.load(wanted)
    assert all(torch.equal(other.leaves[name], tensor) for name, tensor in wanted.items())


def test_what_does_not_fit_the_others_is_refused(folder: Path) -> None:
    for sections, words in (
        ({"lora": {"use_dora": True, "rank_dropout": 0.1}}, "rank_dropout and use_dora"),
        ({"optim": {"optimizer": "adamw_schedule_free"}, "lora": {"scale_weight_norms": 1.0}}, "average"),
        (
            {"optim": {"optimizer": "adafactor", "relative_step": True}, "lora": {"loraplus_lr_ratio": 2.0}},
            "learning rates",
        ),
    ):
        with pytest.raises(ValidationError, match=words):
            tiny_recipe(folder, **sections)


SMALLER = {"match": r".*to_q", "rank": 2, "alpha": 1.0, "learning_rate": 5e-4}
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "loha": {"alpha": 2.0, "overrides": [SMALLER]},
    "lokr": {
        "factor": 1,
        "alpha": 2.0,
        "overrides": [{"match": r".*to_q", "rank": 2, "alpha": 1.0, "learning_rate": 5e-4}],
    },
    "oft": {"overrides": [{"match": r".*to_q", "rank": 8, "learning_rate": 5e-4}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_adapter(folder: Path, tmp_path: Path, kind: str) -> None:
    lora = {"type": kind, "rank": 4, "targets": r"mid_block\..*to_[qk]", **OTHER_KINDS[kind]}
    family, model, adapter = trained(folder, lora=lora)
    shapes = {name: dense_shape(layer.get_base_layer()) for name, (_, _, layer) in adapter.modules.items()}
    sections = sections_of(family.recipe.lora, shapes)
    for name, shape in shapes.items():
        numbers = sum(leaf.numel() for leaf_name, leaf in adapter.leaves.items() if leaf_name.startswith(f"{name}."))
        assert numbers == adapter.weights_of(sections[name], shape)
        assert (sections[name].rank != 4) is name.endswith("to_q")
    layers = [adapter.modules[name][2] for name in (QUERY, KEY)]
    if kind != "oft":
        assert layers[0].scaling["default"] == 0.5 == layers[1].scaling["default"]
    groups = adapter.groups(family.recipe.optim, family.recipe.lora)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert {(name.split(".")[-2] == "to_q", rate) for name, rate in rates.items()} == {(True, 5e-4), (False, 1e-4)}
    # The file, read back and started from
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": "fp32"})})
    path = tmp_path / "lora.safetensors"
    writers.write("kohya", path, family, adapter, recipe, RunFacts(steps=2, epochs=1, num_epochs=1))
    assert writers.verify("kohya", path, family, model, adapter).relative_difference < 1e-4
    started = tiny_recipe(folder, lora={**lora, "init_from": str(path)})
    again = family.load(torch.float32, CPU)
    inject(family_for(started), again, started.lora, 3)
    assert torch.allclose(unet_output(again.components["unet"]), unet_output(model.components["unet"]), atol=1e-5)
    with pytest.raises(AdapterError) as caught:
        other = tiny_recipe(folder, lora={**lora, "overrides": [], "rank": 1, "init_from": str(path)})
        inject(family_for(other), family.load(torch.float32, CPU), other.lora, 3)
    assert caught.value.code.startswith("init-from")


def test_what_an_entry_cannot_set(folder: Path) -> None:
    for kind, entry, words in (
        ("oft", {"alpha": 2.0}, "on an OFT"),
        ("ia3", {"rank": 2}, "on an IA3"),
        ("ia3", {"alpha": 2.0}, "on an IA3"),
    ):
        with pytest.raises(ValidationError, match=words):
            tiny_recipe(folder, lora={"type": kind, "overrides": [{"match": ".*", **entry}]})
    recipe = tiny_recipe(folder, lora={"type": "ia3", "overrides": [{"match": ".*", "learning_rate": 1e-3}]})
    assert recipe.lora.overrides[0].learning_rate == 1e-3
