"""Whole runs on a quantised base: another base is trained on, and a resume gives the bytes of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.errors import ResumeError
from lora_rocm.recipe.schema import Recipe
from tests.train.runs import bytes_of, make_recipe, material, rewound, start
from tests.wording import saying

__all__ = ["material"]


def quantised_recipe(material: Path, quantization: str) -> Recipe:
    made = make_recipe(
        material, train={"max_train_steps": 2, "gradient_accumulation_steps": 1}, output={"save_every_n_steps": 1}
    )
    return made.model_copy(update={"model": made.model.model_copy(update={"quantization": quantization})})


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
