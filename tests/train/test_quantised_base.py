"""Whole runs on a quantised base: another base is trained on, and a resume gives the bytes of the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.errors import ResumeError
from lora_rocm.kernels import eight_bit
from lora_rocm.memory import oom_recovery
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.tiny_models import SHALLOW_WIDER, write_tiny_sdxl
from tests.train.runs import bytes_of, losses_of, make_recipe, material, rewound, start
from tests.wording import saying

__all__ = ["material"]


def quantised_recipe(material: Path, quantization: str, compute: str = "bf16") -> Recipe:
    made = make_recipe(
        material, train={"max_train_steps": 2, "gradient_accumulation_steps": 1}, output={"save_every_n_steps": 1}
    )
    stored = {"quantization": quantization, "compute": compute}
    if compute != "bf16":
        wider = material / "wide enough for products in eight bits"
        stored["name_or_path"] = str(wider if wider.exists() else write_tiny_sdxl(wider, **SHALLOW_WIDER))
    return made.model_copy(update={"model": made.model.model_copy(update=stored)})


def test_a_run_on_nf4_resumes_to_the_byte_and_not_with_another_format(material: Path, tmp_path: Path) -> None:
    straight, broken, dense = (tmp_path / name for name in ("straight", "broken", "dense"))
    assert start(quantised_recipe(material, "nf4"), straight)
    rewound(straight, broken, 1)
    with pytest.raises(ResumeError, check=saying("train/a-key-that-may-not-change")):
        start(quantised_recipe(material, "int8"), broken)
    assert start(quantised_recipe(material, "nf4"), broken)
    assert bytes_of(broken) == bytes_of(straight)
    assert start(quantised_recipe(material, "none"), dense)
    assert bytes_of(dense) != bytes_of(straight), "the control"


def in_bf16(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"compute": "bf16"})})


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_run_with_products_in_eight_bits_resumes_to_the_byte(name: str, material: Path, tmp_path: Path) -> None:
    straight, broken, unpacked = (tmp_path / name for name in ("straight", "broken", "unpacked"))
    assert start(quantised_recipe(material, name, name), straight)
    rewound(straight, broken, 1)
    with pytest.raises(ResumeError, check=saying("train/a-key-that-may-not-change")):
        start(in_bf16(quantised_recipe(material, name, name)), broken)
    assert start(quantised_recipe(material, name, name), broken)
    assert bytes_of(broken) == bytes_of(straight)
    assert start(in_bf16(quantised_recipe(material, name, name)), unpacked)
    assert bytes_of(unpacked) != bytes_of(straight), "the control"


@pytest.mark.parametrize("memory", ["recompute", "keep"])
def test_a_full_device_in_the_middle_of_a_product_in_eight_bits_costs_no_sample(
    memory: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is repeated with half of the samples at once. Parts with few rows are then multiplied in bf16."""
    recipe = quantised_recipe(material, "fp8", "fp8")
    recipe = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"memory": memory})})
    assert start(recipe, tmp_path / "untouched")
    rows, calls = eight_bit.scaled_rows, [0]

    def full(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 10:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 MiB.")
        return rows(*given)

    monkeypatch.setattr(oom_recovery, "empty_pools", lambda: None)
    monkeypatch.setattr(eight_bit, "scaled_rows", full)
    assert start(recipe, tmp_path / "hit")
    events = read_events(RunDir(tmp_path / "hit").events())
    assert [event["id"] for event in events if event["type"] == "change"] == ["micro-batch-halved"]
    assert calls[0] > 20 and losses_of(tmp_path / "hit") == pytest.approx(losses_of(tmp_path / "untouched"), rel=2e-2)
