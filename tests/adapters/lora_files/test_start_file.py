"""A LoRA file that does not fit a recipe: the advice is complete, for any file and recipe."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.kinds.lora import LoraAdapter
from lora_rocm.adapters.kinds.lora_entry import LORA
from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.adapters.lora_files.start_file import check_start
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import family_for
from lora_rocm.recipe.load import load_recipe
from tests.adapters.lycoris import locon
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW_RISING, tiny_recipe, unet_output, write_tiny_sdxl

CPU = torch.device("cpu")
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
TEXT = "encoder.layers.0.self_attn.q_proj"
MODULES = (
    f"unet.{BLOCK}.attn1.to_q",  # in the preset attention
    f"unet.{BLOCK}.ff.net.0.proj",  # in attention-mlp
    "unet.mid_block.resnets.0.conv1",  # in attention-mlp-conv
    "unet.time_embedding.linear_1",  # in none
    "unet.conv_out",
    f"text_encoder.{TEXT}",
)
SETTING = re.compile(r"(lora\.\w+) to (\[.*?\](?=[,.])|[\w-]+)")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(family, its model with text encoders, folder)."""
    folder = write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_RISING)
    family = family_for(tiny_recipe(folder, lora={"train_text_encoder": True}))
    return family, family.load(torch.float32, CPU), folder


def write(world: Any, path: Path, modules: dict[str, int], wd_on_output: bool | None = None) -> Path:
    """A kohya file of these modules, with their ranks."""
    family, model, _ = world
    rng, tensors = torch.Generator().manual_seed(1), {}
    for name, rank in modules.items():
        component, _, module = name.partition(".")
        root = model.components[component]
        layer = root.get_submodule(module) if component == "unet" else dict(root.named_modules())[text_path(root)]
        stored, _ = locon(layer.weight.detach(), rank, rng, wd_on_output=wd_on_output)
        tensors |= {
            f"{family.lora_file_names.key(component, module)}.{part}": tensor for part, tensor in stored.items()
        }
    save_file(tensors, path)
    return path


def text_path(root: torch.nn.Module) -> str:
    return next(name for name, _ in root.named_modules() if name.endswith(TEXT))


def advised(world: Any, lora: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The settings that the refusal names; None where the file is taken. Only names are checked and no layers are
    built. The adapted modules follow from the expressions, as in ``lora.targets``.
    """
    family, model, folder = world
    recipe = read_recipe(folder, path.parent, lora)
    entries = read_lora(family, model.components, path)
    presets = family.lora_targets
    own = (recipe.lora.targets,) if isinstance(recipe.lora.targets, str) else recipe.lora.targets
    preset = presets.get(own[0]) or {**presets["attention"], "unet": "|".join(own)}
    adapted = [
        f"{component}.{module.removeprefix('text_model.')}"
        for component, root in model.components.items()
        if component == "unet" or recipe.lora.train_text_encoder
        for module, layer in root.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d) and re.fullmatch(preset[component], module)
    ]
    try:
        layer = SimpleNamespace(r={PEFT_NAME: recipe.lora.rank})
        stands_in: Any = SimpleNamespace(modules={name: ("", "", layer) for name in adapted}, files=LORA)
        stands_in.unfit = partial(LoraAdapter.unfit, stands_in)
        stands_in.lacking_ranks = partial(LoraAdapter.lacking_ranks, stands_in)
        check_start(family, recipe.lora, stands_in, LORA, entries, path)
    except AdapterError as error:
        assert error.code == "init-from-unfit" and str(path) in error.where
        found = {key.removeprefix("lora."): value for key, value in SETTING.findall(error.fix)}
        assert found and error.fix == f"Set {', '.join(f'lora.{key} to {value}' for key, value in found.items())}."
        return found
    return None


def read_recipe(model: Path, folder: Path, lora: dict[str, Any]) -> Any:
    """The recipe as a user writes it: the advised values as YAML text."""
    (folder / "images").mkdir(exist_ok=True)
    lines = [f"  {key}: {value}" for key, value in lora.items()]
    head = [f"model: {{name_or_path: '{model}'}}", f"data: {{path: '{folder / 'images'}'}}"]
    head += ["train: {max_train_steps: 2}"]
    (folder / "r.yaml").write_text("\n".join([*head, "lora:", *lines]), encoding="utf-8")
    return load_recipe(folder / "r.yaml").recipe


TARGETS = st.sampled_from(
    [
        "attention",
        "attention-mlp",
        "attention-mlp-conv",
        "[conv_in]",
        "'mid_block.*proj_in'",
        f"['{MIDDLE_TARGETS}', conv_in]",
    ]
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(MODULES), st.sampled_from([1, 2, 5, 9]), min_size=1),
    st.sampled_from([None, True]),
    st.fixed_dictionaries(
        {"rank": st.sampled_from([1, 4, 16]), "targets": TARGETS},
        optional={"use_dora": st.sampled_from(["true", "false"]), "train_text_encoder": st.sampled_from(["true"])},
    ),
)
def test_what_is_advised_is_enough(
    world: Any, tmp_path: Path, modules: dict[str, int], dora: bool | None, lora: dict[str, Any]
) -> None:
    path = write(world, tmp_path / "x.safetensors", modules, dora)
    found = advised(world, lora, path)
    if found is not None:
        assert advised(world, lora | found, path) is None, "the advice runs in a circle"
    fits = all(name.startswith("unet.") or "train_text_encoder" in lora for name in modules)
    fits = fits and max(modules.values()) <= lora["rank"] and (dora is None or lora.get("use_dora") == "true")
    assert found is not None or fits, "the control: it asks for what is missing"


@pytest.mark.parametrize("names", [("unet.time_embedding.linear_1", "unet.conv_out"), MODULES], ids=["beyond", "all"])
def test_the_advised_recipe_trains_on_from_the_file(world: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    """With real layers: kohya's mixed ranks, modules of no preset, text encoders."""
    path = write(world, tmp_path / "x.safetensors", {name: 2 + number % 3 for number, name in enumerate(names)})
    lora: dict[str, Any] = {"rank": 1, "targets": f"'{MIDDLE_TARGETS}'"}
    found = advised(world, lora, path)
    assert found is not None and int(found["rank"]) in (3, 4)
    recipe = read_recipe(world[2], tmp_path, {**lora, **found, "init_from": f"'{path}'"})
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    before = unet_output(model.components["unet"])
    adapter = inject(family, model, recipe.lora, 0)
    assert set(names) <= adapter.modules.keys()
    assert not torch.allclose(unet_output(model.components["unet"]), before)


def test_all_that_is_missing_is_said_at_once(world: Any, tmp_path: Path) -> None:
    path = write(world, tmp_path / "x.safetensors", dict.fromkeys(MODULES[:3], 8) | {MODULES[-1]: 2}, wd_on_output=True)
    assert advised(world, {"rank": 4, "targets": "attention"}, path) == {
        "train_text_encoder": "true",
        "targets": "attention-mlp-conv",
        "rank": "8",
        "use_dora": "true",
    }


def started(world: Any, path: Path, **lora: Any) -> AdapterError:
    family, _, folder = world
    recipe = tiny_recipe(folder, lora={"rank": 4, "targets": MIDDLE_TARGETS, "init_from": str(path), **lora})
    with pytest.raises(AdapterError) as caught:
        inject(family, family.load(torch.float32, CPU), recipe.lora, 0)
    return caught.value


def test_a_dora_with_a_magnitude_an_input_cannot_be_trained_on(world: Any, tmp_path: Path) -> None:
    path = write(world, tmp_path / "x.safetensors", {MODULES[0]: 2}, wd_on_output=False)
    error = started(world, path, use_dora=True)
    assert error.code == "init-from-axis" and str(path) in error.where
    assert MODULES[0] in error.what and "[1, 16]" in error.what
    assert "OneTrainer" in error.fix and "wd_on_output=True" in error.fix


def test_modules_of_a_text_encoder_that_no_setting_reaches(world: Any, tmp_path: Path) -> None:
    family, model, _ = world
    shape = model.components["text_encoder_2"].text_projection.weight.shape
    tensors = {"lora_down.weight": torch.ones(2, shape[1]), "lora_up.weight": torch.ones(shape[0], 2)}
    key = family.lora_file_names.key("text_encoder_2", "text_projection")
    save_file({f"{key}.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "x.safetensors")
    error = started(world, tmp_path / "x.safetensors", train_text_encoder=True)
    assert error.code == "init-from-beyond" and "text_encoder_2.text_projection" in error.what
    assert "set" not in error.fix.lower()
