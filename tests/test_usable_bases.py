"""``check``, ``inspect`` and ``train`` agree on each base: sound ones of every family, and broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.children.check_base import weigh
from lora_rocm.commands import inspect_file
from lora_rocm.commands.inspect_file import inspect_text
from lora_rocm.errors import UserError
from lora_rocm.families.base import family_for
from lora_rocm.model_files.models import BASE_JUDGED_BY
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from tests.judging import inspect
from tests.tiny_anima import write_tiny_anima
from tests.tiny_flux import write_tiny_flux
from tests.tiny_llm import write_tiny_gpt_oss
from tests.tiny_models import read_json
from tests.tiny_sd import write_tiny_sd
from tests.wording import mentions, says

SOUND: dict[str, tuple[str, Callable[[Path], object]]] = {
    "sd15": ("sd15", lambda folder: write_tiny_sd(folder, "sd15")),
    "sd2": ("sd2", lambda folder: write_tiny_sd(folder, "sd2")),
    "sdxl": ("sdxl", lambda folder: shutil.copytree(builtin_folder("builtin:tiny-sdxl"), folder)),
    "z-image": ("z-image", lambda folder: shutil.copytree(builtin_folder("builtin:tiny-z-image"), folder)),
    "flux": ("flux", write_tiny_flux),
    "schnell": ("flux", lambda folder: write_tiny_flux(folder, schnell=True)),
    "anima": ("anima", write_tiny_anima),
    "llama": ("causal-lm", lambda folder: shutil.copytree(builtin_folder("builtin:tiny-llama"), folder)),
    "gpt-oss": ("causal-lm", write_tiny_gpt_oss),
}
"""Name -> (family, what writes it)."""
MAIN = {"sdxl": "unet/diffusion_pytorch_model", "z-image": "transformer/diffusion_pytorch_model", "llama": "model"}


def changed(file: str, **keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**read_json(path), **keys}), encoding="utf-8")

    return change


def gone(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return remove


def weights(stem: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / f"{stem}.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return rewrite


def a_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if tensors[name].ndim == 2 and "embed" not in name)


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[a_matrix(tensors)]


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["another.weight"] = torch.zeros(3, 3)


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = a_matrix(tensors)
    tensors[name] = tensors[name][:-1].contiguous()


def codes_without_scale(tensors: dict[str, torch.Tensor]) -> None:
    name = a_matrix(tensors)
    tensors[name] = tensors[name].to(torch.int8)


def infinite_norm(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if "norm" in name and tensors[name].ndim == 1)
    tensors[name][-1] = torch.inf


def scale_of_columns(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("to_q.weight"))
    tensors[name] = tensors[name].to(torch.int8)
    tensors[name.removesuffix("weight") + "weight_scale"] = torch.ones(1, tensors[name].shape[0])


SCHEDULER = "scheduler/scheduler_config.json"
BROKEN: list[tuple[str, str, Callable[[Path], None]]] = [
    ("sdxl", "EDM", changed(SCHEDULER, _class_name="EDMEulerScheduler")),
    ("sdxl", "index of EDM", changed("model_index.json", scheduler=["diffusers", "EDMDPMSolverMultistepScheduler"])),
    ("sdxl", "continuous", changed(SCHEDULER, timestep_type="continuous")),
    ("z-image", "euler", changed(SCHEDULER, _class_name="EulerDiscreteScheduler")),
    ("flux", "ddpm", changed(SCHEDULER, _class_name="DDPMScheduler")),
    ("anima", "shift", changed(SCHEDULER, shift=-1)),
    ("sdxl", "no scheduler", gone("scheduler")),
    ("sdxl", "no vae", gone("vae")),
    ("sdxl", "no text encoder", gone("text_encoder_2")),
    ("sdxl", "no tokenizer", gone("tokenizer_2")),
    ("z-image", "no tokenizer", gone("tokenizer")),
    ("z-image", "no transformer", gone("transformer")),
    ("llama", "no config", gone("config.json")),
    ("llama", "no tokenizer", gone("tokenizer.json")),
    ("llama", "no weights", gone("model.safetensors")),
    ("llama", "code", changed("config.json", auto_map={"AutoModel": "x.Y"})),
    ("llama", "type", changed("config.json", model_type="of-my-own")),
    ("llama", "layers", changed("config.json", num_hidden_layers=9)),
    ("gpt-oss", "dense experts", changed("config.json", quantization_config={})),
    ("sdxl", "gptq", changed("unet/config.json", quantization_config={"quant_method": "gptq"})),
    ("sdxl", "channels", changed("unet/config.json", out_channels=8)),
    ("sdxl", "scale", weights(MAIN["sdxl"], scale_of_columns)),
    *((name, change.__name__, weights(stem, change)) for name, stem in MAIN.items()
      for change in (without_one, one_more, of_another_shape, codes_without_scale, infinite_norm)),
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    for name, (_, write) in SOUND.items():
        write(folder / name)
    return folder


def recipe_of(name: str, base: Path) -> Recipe:
    model = {"family": SOUND[name][0], "name_or_path": str(base)}
    sections: dict[str, Any] = {"data": {"path": "."}, "train": {"max_train_steps": 1}, "runtime": {"device": "cpu"}}
    variant = {"variant": "schnell"} if name == "schnell" else {}
    return recipe_from({"model": {**model, **variant}, "cache": {"dir": str(base.parent / "cache")}, **sections})


def checked(recipe: Recipe) -> UserError | None:
    try:
        weigh(recipe)
    except UserError as error:
        return error
    return None


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_base_is_promised_accepted_and_loaded(sound: Path, name: str) -> None:
    recipe, found = recipe_of(name, sound / name), inspect(sound / name)
    assert checked(recipe) is None
    assert SOUND[name][0] in found["trainable"] and says(inspect_text(found), "usable_bases/can-be-trained-on-with")
    assert BASE_JUDGED_BY in inspect_text(found)
    assert family_for(recipe).load(torch.float32, torch.device("cpu")).components


@pytest.mark.parametrize(("name", "what", "change"), BROKEN, ids=[f"{name}: {what}" for name, what, _ in BROKEN])
def test_a_broken_base_is_refused_and_not_promised(
    sound: Path, tmp_path: Path, name: str, what: str, change: Callable[[Path], None]
) -> None:
    base = Path(shutil.copytree(sound / name, tmp_path / name))
    change(base)
    refusal = checked(recipe_of(name, base))
    assert refusal is not None and refusal.exit_code == 2 and refusal.where
    try:
        found = inspect(base)
    except UserError:
        return  # it is not a model at all
    assert found["trainable"] == [] and not mentions(inspect_text(found), "commands/can-be-trained")
    assert BASE_JUDGED_BY not in inspect_text(found)
    assert found["unusable"]


def test_the_command_asks_a_child_process(sound: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(sound / "sdxl", tmp_path / "sdxl"))
    changed(SCHEDULER, _class_name="EDMEulerScheduler")(base)
    found = inspect_file.inspect(base)
    assert found["trainable"] == [] and "EDMEulerScheduler" in found["unusable"]
