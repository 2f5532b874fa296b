"""A number in a small tensor that is not finite is found before a run loads it, also if loading converts the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.base_models.small_tensors import require_finite
from lora_rocm.errors import ModelError
from lora_rocm.families.base import family_for
from lora_rocm.families.common.latent_family import LatentFamily
from lora_rocm.recipe.kinds import recipe_from
from tests.tiny_models import SHALLOW, tiny_pipeline, write_config_folder, write_single_file


@pytest.mark.parametrize("end", ["in_proj_bias", "norm.weight"])
def test_a_number_that_is_not_finite_is_found_by_the_name_in_the_file(tmp_path: Path, end: str) -> None:
    pipeline = tiny_pipeline(**SHALLOW)
    file = write_single_file(pipeline, tmp_path / "x.safetensors")
    config = write_config_folder(pipeline, tmp_path / "config")
    model = {"family": "sdxl", "name_or_path": str(file), "config": str(config)}
    recipe = recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}})

    def look() -> None:
        family = family_for(recipe)
        assert isinstance(family, LatentFamily)
        require_finite(family.source)

    look()  # the control
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(end))
    tensors[name].reshape(-1)[-1] = torch.inf
    save_file(tensors, file)
    with pytest.raises(ModelError) as caught:
        look()
    assert (caught.value.code, caught.value.where) == ("weights-not-finite", str(file))
