"""A base of one family, given as another: the refusal names the real family and how to train on it. All pairs of
families.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.errors import ModelError
from lora_rocm.families.base import family_for
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.recipe.kinds import recipe_from
from tests.tiny_anima import write_tiny_anima
from tests.tiny_flux import write_tiny_flux
from tests.tiny_models import read_json
from tests.tiny_sd import write_tiny_sd

DIT = "model.diffusion_model."
OF_FILES: dict[str, list[str]] = {
    "sd15": ["cond_stage_model.transformer.text_model.embeddings.position_ids"],
    "sd2": ["cond_stage_model.model.positional_embedding"],
    "sdxl": ["conditioner.embedders.0.transformer.text_model.x", "conditioner.embedders.1.model.text_projection"],
    "z-image": [f"{DIT}cap_embedder.1.weight", f"{DIT}noise_refiner.0.attention.qkv.weight", f"{DIT}cap_pad_token"],
    "flux": [f"{DIT}double_blocks.0.img_attn.qkv.weight", f"{DIT}guidance_in.in_layer.weight"],
    "anima": [f"{DIT}blocks.0.mlp.layer1.weight", f"{DIT}llm_adapter.blocks.0.cross_attn.q_proj.weight"],
    "causal-lm": ["model.layers.0.self_attn.q_proj.weight"],
}
"""Family -> names of tensors that identify its files."""
FOLDERS: dict[str, Callable[[Path], object]] = {
    "sd15": lambda folder: write_tiny_sd(folder, "sd15"),
    "sd2": lambda folder: write_tiny_sd(folder, "sd2"),
    "sdxl": lambda folder: shutil.copytree(builtin_folder("builtin:tiny-sdxl"), folder),
    "z-image": lambda folder: shutil.copytree(builtin_folder("builtin:tiny-z-image"), folder),
    "flux": write_tiny_flux,
    "anima": write_tiny_anima,
    "causal-lm": lambda folder: shutil.copytree(builtin_folder("builtin:tiny-llama"), folder),
}
PAIRS = list(permutations(FAMILIES.names, 2))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(family, "file" or "folder") -> a base."""
    folder, found = tmp_path_factory.mktemp("bases"), {}
    for name in FAMILIES.names:
        found[name, "file"], found[name, "folder"] = folder / f"{name}.safetensors", folder / name
        save_file({tensor: torch.zeros(1) for tensor in OF_FILES[name]}, found[name, "file"])
        FOLDERS[name](found[name, "folder"])
    for name, width in (("sd15", 768), ("sd2", 1024)):  # one pipeline serves both: the text's width decides
        config = found[name, "folder"] / "unet" / "config.json"
        config.write_text(json.dumps({**read_json(config), "cross_attention_dim": width}), encoding="utf-8")
    return found


def refusal(family: str, base: Path, registry: FamilyRegistry = FAMILIES) -> ModelError:
    model = {"family": family, "name_or_path": str(base)}
    recipe = recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}}, registry)
    with pytest.raises(ModelError) as caught:
        family_for(recipe).examine()
    return caught.value


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize(("given", "wanted"), PAIRS)
def test_a_base_of_another_family_is_named(
    bases: dict[tuple[str, str], Path], given: str, wanted: str, kind: str
) -> None:
    error = refusal(wanted, bases[given, kind])
    assert error.code == "wrong-family" and FAMILIES[wanted].title in error.what
    assert f"model.family: {given}" in error.fix, (error.what, error.fix)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("wanted", FAMILIES.names)
def test_only_families_that_can_be_chosen_are_named(bases: dict[tuple[str, str], Path], wanted: str, kind: str) -> None:
    alone = FamilyRegistry([FAMILIES[wanted]])
    for given in FAMILIES.names:
        if given != wanted:
            error = refusal(wanted, bases[given, kind], alone)
            assert error.code == "wrong-family" and "model.family:" not in error.fix, (given, error.fix)
