"""Loading back: honest files pass, every kind of wrong file is caught."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from tests.lora_files import cannot_read_by_inspect, without_share
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW_RISING, trained, write_tiny_sdxl
from tests.wording import saying, says

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    # faults that the tests insert
    pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning"),
    pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning"),
]

FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
FORMS = ("kohya", "diffusers", "peft")
MODULE = {
    "kohya": "lora_unet_middle_block_1_proj_in",
    "diffusers": "unet.mid_block.attentions.0.proj_in",
    "peft": "base_model.model.mid_block.attentions.0.proj_in",
}
DOWN = {"kohya": "lora_down.weight", "diffusers": "lora_A.weight", "peft": "lora_A.weight"}
UP = {"kohya": "lora_up.weight", "diffusers": "lora_B.weight", "peft": "lora_B.weight"}
MAGNITUDE = {"kohya": "dora_scale", "diffusers": "lora_magnitude_vector", "peft": "lora_magnitude_vector"}
MODULE["comfyui"], MAGNITUDE["comfyui"] = MODULE["kohya"], MAGNITUDE["kohya"]
LORA = {"rank": 4, "alpha": 2.0, "targets": MIDDLE_TARGETS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_RISING)
    adapted.cache_clear()


@cache
def adapted(folder: Path, dtype: str, lora: str) -> tuple[Any, Any, Any]:
    """Shared between the tests, which may not change it; ``lora`` as JSON."""
    return trained(folder, lora=json.loads(lora), output={"dtype": dtype})


def written(folder: Path, tmp_path: Path, form: str, dtype: str = "fp16", **lora: Any) -> tuple[Any, Any, Any, Path]:
    family, model, adapter = adapted(folder, dtype, json.dumps(LORA | lora))
    path = tmp_path / ("peft" if form == "peft" else "lora.safetensors")
    writers.write(form, path, family, adapter, family.recipe, FACTS)
    return family, model, adapter, path


def edit(form: str, path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file and keep the rest."""
    file = path / "unet" / "adapter_model.safetensors" if form == "peft" else path
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "lora"), [
    pytest.param("fp32", {"targets": "attention-mlp"}, marks=pytest.mark.slow),
    ("bf16", {"use_rslora": True, "train_text_encoder": True}),
    pytest.param("fp32", {"use_dora": True, "targets": "attention-mlp-conv", "train_text_encoder": True},
                 marks=pytest.mark.slow),
    ("fp16", {"use_dora": True, "targets": rf"{MIDDLE_TARGETS}|.*resnets\.0\.(conv1|conv_shortcut|time_emb_proj)"}),
])  # fmt: skip
def test_honest_files_pass(folder: Path, tmp_path: Path, form: str, dtype: str, lora: dict[str, Any]) -> None:
    family, model, adapter, path = written(folder, tmp_path, form, dtype, **lora)
    before = adapter.state()
    found = writers.verify(form, path, family, model, adapter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state().items())
    assert found.relative_difference <= {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}[dtype]
    assert found.max_difference >= 0.0
    assert (dtype == "fp32") or found.max_difference > 0.0  # it did compare with the file's content
    assert bool(found.cannot_read) == (form != "kohya" or bool(lora.get("use_dora")))
    assert all(said == without_share(found.cannot_read) for said in cannot_read_by_inspect(path))


def test_an_untrained_adapter_passes(folder: Path, tmp_path: Path) -> None:
    (family, model, adapter), path = trained(folder, lora=LORA), tmp_path / "lora.safetensors"
    adapter.load({name: torch.zeros_like(p) if name.endswith("B") else p for name, p in adapter.state().items()})
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    assert writers.verify("kohya", path, family, model, adapter).relative_difference == 0.0


def test_tiny_weights_in_fp16_pass(folder: Path, tmp_path: Path) -> None:
    """Below fp16's normal range rounding is coarse, which is not a fault of the file."""
    (family, model, adapter), path = trained(folder, lora=LORA), tmp_path / "lora.safetensors"
    adapter.load({name: p * 1e-6 if name.endswith("B") else p for name, p in adapter.state().items()})
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    assert writers.verify("kohya", path, family, model, adapter).relative_difference > 1e-3


@pytest.mark.parametrize("targets", ["attention", "attention-mlp"])
def test_of_the_diffusers_form_comfyui_applies_a_part_and_this_is_said(
    folder: Path, tmp_path: Path, targets: str
) -> None:
    """ComfyUI's ``model_lora_keys_unet`` knows these names where no attention projection is in them."""
    family, model, adapter, path = written(folder, tmp_path, "diffusers", targets=targets)
    said = writers.verify("diffusers", path, family, model, adapter).cannot_read
    names = {name.rpartition(".lora_")[0] for name in load_file(path)}
    known = {name for name in names if not re.search(r"\.to_(q|k|v|out\.0)$", name)}
    assert bool(known) == (targets != "attention") and len(known) < len(names)
    (comfy,) = [words for words in said if words.startswith("ComfyUI")]
    assert "a part" in comfy and "log" in comfy


def test_who_cannot_read_a_dora_is_said(folder: Path, tmp_path: Path) -> None:
    family, model, adapter, path = written(folder, tmp_path, "kohya", use_dora=True)
    found = writers.verify("kohya", path, family, model, adapter)
    said = " ".join(found.cannot_read)
    assert found.can_read == ("LyCORIS",) and "LyCORIS" not in said
    assert all(name in said for name in ("diffusers", "A1111", "ComfyUI", "Forge"))
    named = [text.partition(" (")[0] for text in found.cannot_read]
    assert len(named) == len(set(named)) and " and " not in str(named), "each program is named once"
    assert ["%" in text for text in found.cannot_read] == [name in ("ComfyUI", "Forge") for name in named]


def test_comfyui_reads_a_dora_in_its_own_form(folder: Path, tmp_path: Path) -> None:
    family, model, adapter, path = written(folder, tmp_path, "comfyui", use_dora=True)
    found = writers.verify("comfyui", path, family, model, adapter)
    comfy, forge = found.can_read
    assert says(comfy, "export/comfyui-reads-it-exactly-until") and forge == "Forge"
    assert not re.search("ComfyUI|Forge|%", " ".join(name.partition(" (")[0] for name in found.cannot_read))


def by_comfyui(weight: Tensor, parts: dict[str, Tensor], norm_of_base: bool) -> Tensor:
    """ComfyUI's weight_decompose on the output axis, row by row; and with the adapted weight's norm, as in LyCORIS."""
    up, down = parts["lora_up.weight"].flatten(1), parts["lora_down.weight"].flatten(1)
    rows = []
    for row, magnitude, old in zip(up, parts["dora_scale"].flatten(), weight.flatten(1), strict=True):
        moved = old + parts["alpha"] / len(down) * (row[:, None] * down).sum(0)
        rows.append(moved * magnitude / (old if norm_of_base else moved).square().sum().sqrt())
    return torch.stack(rows).reshape(weight.shape)


def test_a_dora_for_comfyui_has_its_effect_by_comfyui_s_rule(folder: Path, tmp_path: Path) -> None:
    """And the file for all has it by the definition; each is off by the other's rule, and only one is read here."""
    off: dict[tuple[str, bool], float] = {}
    for form in ("kohya", "comfyui"):
        lora = {"use_dora": True, "targets": r"mid_block\.(attentions\.0\.proj_in|resnets\.0\.conv1)"}
        family, model, adapter, path = written(folder, tmp_path, form, "fp32", **lora)
        assert writers.verify(form, path, family, model, adapter).relative_difference < 1e-5
        tensors, table, entries = load_file(path), adapter.key_table(form), adapter.entries()
        for rule in (True, False):
            wrong = whole = 0.0
            for key in table.parts:
                parts = {name.removeprefix(f"{key}."): t for name, t in tensors.items() if name.startswith(f"{key}.")}
                if parts:
                    weight = adapter.modules[table.whole(key)][2].get_base_layer().weight.detach()
                    wanted = entries[table.whole(key)].effect(weight)
                    wrong += float((by_comfyui(weight, parts, rule) - weight - wanted).square().sum())
                    whole += float(wanted.square().sum())
            off[form, rule] = (wrong / whole) ** 0.5
    assert off["kohya", False] < 1e-5 and off["comfyui", True] < 1e-5
    assert off["kohya", True] > 0.01 and off["comfyui", False] > 0.01, "the control"
    with pytest.raises(AdapterError, check=saying("export/comfyuis-rule-alone")):
        read_lora(family, model.components, path)


def test_a_plain_lora_for_comfyui_is_the_file_for_all(folder: Path, tmp_path: Path) -> None:
    family, model, _, path = written(folder, tmp_path, "comfyui", "fp32")
    comfyui = load_file(path)
    kohya = load_file(written(folder, tmp_path, "kohya", "fp32")[3])
    assert comfyui.keys() == kohya.keys() and all(torch.equal(kohya[name], tensor) for name, tensor in comfyui.items())
    assert read_lora(family, model.components, path)


WRONG: dict[str, Callable[[str, dict[str, Tensor]], object]] = {
    "a wrong factor": lambda form, t: t[f"{MODULE[form]}.{UP[form]}"].mul_(1.01),
    "one wrong number": lambda form, t: t[f"{MODULE[form]}.{DOWN[form]}"][0, 0].add_(0.1),
    "a missing up": lambda form, t: t.pop(f"{MODULE[form]}.{UP[form]}"),
    "a missing down": lambda form, t: t.pop(f"{MODULE[form]}.{DOWN[form]}"),
    "a missing module": lambda form, t: [t.pop(name) for name in list(t) if name.startswith(MODULE[form] + ".")],
    "not a number": lambda form, t: t[f"{MODULE[form]}.{UP[form]}"].fill_(float("nan")),
    "up and down swapped": lambda form, t: t.update(
        {
            f"{MODULE[form]}.{UP[form]}": t[f"{MODULE[form]}.{DOWN[form]}"].T.contiguous(),
            f"{MODULE[form]}.{DOWN[form]}": t[f"{MODULE[form]}.{UP[form]}"].T.contiguous(),
        }
    ),
    "another module's weights": lambda form, t: t.update(
        {f"{MODULE[form]}.{UP[form]}": t[f"{MODULE[form].replace('proj_in', 'proj_out')}.{UP[form]}"].clone()}
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_caught(folder: Path, tmp_path: Path, form: str, fault: str) -> None:
    family, model, adapter, path = written(folder, tmp_path, form)
    edit(form, path, lambda tensors: WRONG[fault](form, tensors))
    with pytest.raises(ExportError) as caught:
        writers.verify(form, path, family, model, adapter)
    assert caught.value.code == "export-differs"


@pytest.mark.parametrize("form", [*FORMS, "comfyui"])
def test_a_wrong_magnitude_is_caught(folder: Path, tmp_path: Path, form: str) -> None:
    family, model, adapter, path = written(folder, tmp_path, form, use_dora=True)
    writers.verify(form, path, family, model, adapter)
    edit(form, path, lambda tensors: tensors[f"{MODULE[form]}.{MAGNITUDE[form]}"].mul_(1.01))
    with pytest.raises(ExportError):
        writers.verify(form, path, family, model, adapter)


@pytest.mark.parametrize("alpha", [4.0, None])
def test_a_wrong_or_missing_alpha_is_caught(folder: Path, tmp_path: Path, alpha: float | None) -> None:
    """Without an alpha ComfyUI takes scale 1, while diffusers guesses from the other modules."""
    family, model, adapter, path = written(folder, tmp_path, "kohya")

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{MODULE['kohya']}.alpha"]
        if alpha is not None:
            tensors[f"{MODULE['kohya']}.alpha"] = torch.tensor(alpha)

    edit("kohya", path, change)
    with pytest.raises(ExportError):
        writers.verify("kohya", path, family, model, adapter)


def test_an_alpha_that_forgets_rslora_is_caught(folder: Path, tmp_path: Path) -> None:
    family, model, adapter, path = written(folder, tmp_path, "kohya", use_rslora=True)
    edit("kohya", path, lambda t: [tensor.fill_(2.0) for name, tensor in t.items() if name.endswith("alpha")])
    with pytest.raises(ExportError):
        writers.verify("kohya", path, family, model, adapter)


def test_a_diffusers_file_without_its_config_is_caught(folder: Path, tmp_path: Path) -> None:
    """Alpha would be taken for the rank."""
    family, model, adapter, path = written(folder, tmp_path, "diffusers")
    save_file(load_file(path), path, {"format": "pt"})
    with pytest.raises(ExportError):
        writers.verify("diffusers", path, family, model, adapter)


def test_a_peft_config_with_another_alpha_is_caught(folder: Path, tmp_path: Path) -> None:
    family, model, adapter, path = written(folder, tmp_path, "peft")
    config = path / "unet" / "adapter_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(values | {"lora_alpha": 3}), encoding="utf-8")
    with pytest.raises(ExportError):
        writers.verify("peft", path, family, model, adapter)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_moment_is_caught(folder: Path, tmp_path: Path, form: str) -> None:
    family, model, adapter, path = written(folder, tmp_path, form)
    adapter.load({name: tensor + 0.001 for name, tensor in adapter.state().items()})
    with pytest.raises(ExportError):
        writers.verify(form, path, family, model, adapter)


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_or_missing_file_is_caught(folder: Path, tmp_path: Path, form: str) -> None:
    family, model, adapter, path = written(folder, tmp_path, form)
    file = path / "unet" / "adapter_model.safetensors" if form == "peft" else path
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ExportError):
        writers.verify(form, path, family, model, adapter)
    shutil.rmtree(path) if form == "peft" else path.unlink()
    with pytest.raises(ExportError):
        writers.verify(form, path, family, model, adapter)


def test_a_missing_text_encoder_is_caught(folder: Path, tmp_path: Path) -> None:
    family, model, adapter, path = written(folder, tmp_path, "kohya", train_text_encoder=True)
    edit("kohya", path, lambda t: [t.pop(name) for name in list(t) if name.startswith("lora_te2")])
    with pytest.raises(ExportError) as caught:
        writers.verify("kohya", path, family, model, adapter)
    assert says(caught.value.what, "export/file-and-adapter-differ-in-12-modules")


def test_a_stray_key_is_caught(folder: Path, tmp_path: Path) -> None:
    """One name that diffusers does not know disables its whole conversion."""
    family, model, adapter, path = written(folder, tmp_path, "kohya")
    edit("kohya", path, lambda t: t.update(bundle_emb=torch.zeros(1)))
    with pytest.raises(ExportError):
        writers.verify("kohya", path, family, model, adapter)
