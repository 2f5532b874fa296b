"""The sd-scripts variant has the names that kohya's programs look up; of SDXL it is the kohya file."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from lora_rocm.adapters.adapter_to_entries import loaded_entry
from lora_rocm.adapters.lora_files.key_table import canonical
from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.commands.inspect_file import inspect
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from tests.families.common.dit.cases import ZImage, adapted
from tests.tiny_models import SHALLOW_WIDER, trained, write_tiny_sdxl

FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
RECORDED = Path(__file__).with_name("recorded")
OVERRIDES = [{"match": r".*attn2\.to_k", "rank": 2, "alpha": 5}]


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    folder = write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)
    return trained(folder, lora={"rank": 4, "alpha": 2.0, "overrides": OVERRIDES}, output={"dtype": "fp32"})


def error_in_diffusers(family: Any, adapter: Any, path: Path) -> float:
    """The error of the effect when diffusers' own loader reads a file, as a share of the effect."""
    off = whole = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's warning about names that diffusers derives from unequal alphas
        loaded_model = family.lora_file_names.load_in_diffusers(path, adapter.components)
    for component, root in loaded_model.items():
        for name, layer in root.named_modules():
            if isinstance(layer, BaseTunerLayer):
                live = adapter.entries()[canonical(component, name)].update()
                loaded = loaded_entry(type(adapter), layer).update()
                off, whole = off + float((loaded - live).norm() ** 2), whole + float(live.norm() ** 2)
    return (off / whole) ** 0.5


def test_sdxl_in_the_sd_scripts_form_is_the_kohya_file(sdxl: tuple[Any, Any, Any], tmp_path: Path) -> None:
    family, model, adapter = sdxl
    files = {form: tmp_path / f"{form}.safetensors" for form in ("kohya", "sd-scripts")}
    for form, path in files.items():
        writers.write(form, path, family, adapter, family.recipe, FACTS)
    ours, theirs = (load_file(path) for path in files.values())
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], rtol=1e-6) for name in ours)
    assert len({float(tensor) for name, tensor in theirs.items() if name.endswith(".alpha")}) == 1
    assert error_in_diffusers(family, adapter, files["sd-scripts"]) < 1e-5
    assert inspect(files["sd-scripts"])["adapter"]["readers"]["diffusers"] == "reads it"


def test_unlike_alphas_are_not_promised_to_diffusers(sdxl: tuple[Any, Any, Any], tmp_path: Path) -> None:
    family, model, adapter = sdxl
    table, tensors = adapter.key_table("kohya"), {}
    for key, entry in table.of_keys(adapter.entries()).items():
        tensors |= {f"{key}.{ending}": tensor for ending, tensor in entry.tensors("kohya", torch.float32).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    assert len({float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}) == 2
    assert error_in_diffusers(family, adapter, tmp_path / "x.safetensors") > 0.1
    readers = inspect(tmp_path / "x.safetensors")["adapter"]["readers"]
    assert readers["diffusers"].startswith("reads it at another strength") and readers["kohya"] == "read it"
    read = read_lora(family, model.components, tmp_path / "x.safetensors")
    for name, entry in adapter.entries().items():
        torch.testing.assert_close(read[name].update(), entry.update())


def test_z_image_in_the_sd_scripts_form_has_the_names_that_musubi_tuner_looks_up(tmp_path: Path) -> None:
    case = ZImage(tmp_path / "model")
    recorded = json.loads((RECORDED / "musubi_z_image.json").read_text(encoding="utf-8"))["modules"]
    known = {re.sub(r"(layers|refiner)_\d+_", r"\1_0_", name) for name in recorded}
    overrides = [{"match": r".*attention\.to_k", "rank": 3, "alpha": 5}]
    family = case.family(lora={"rank": 2, "alpha": 1, "targets": "all-linear", "overrides": overrides})
    model, adapter = adapted(family)
    path = tmp_path / "x.safetensors"
    writers.write("sd-scripts", path, family, adapter, family.recipe, FACTS)
    tensors = load_file(path)
    modules = {name.partition(".")[0] for name in tensors}
    assert len(modules) == len(adapter.entries())
    assert {re.sub(r"(layers|refiner)_\d+_", r"\1_0_", name) for name in modules} <= known
    for name, entry in adapter.entries().items():  # as utils/lora_utils.py merges: up @ down * alpha / rank
        key = f"lora_unet_{name.removeprefix('transformer.').replace('.', '_')}"
        down, up = tensors[f"{key}.lora_down.weight"].float(), tensors[f"{key}.lora_up.weight"].float()
        merged = up @ down * (float(tensors[f"{key}.alpha"]) / len(down))
        torch.testing.assert_close(merged, entry.update(), rtol=2e-2, atol=2e-3)  # the file is in bf16
    readers = inspect(path)["adapter"]["readers"]
    assert readers["kohya"] == "read it" and readers["diffusers"] == "reads it"
    names = {name: name.replace("attention_to_q", "attention_qkv").replace("to_out_0", "out") for name in tensors}
    fused = {names[name]: tensor for name, tensor in tensors.items() if not re.search("attention_to_[kv]", name)}
    save_file(fused, path)
    assert inspect(path)["adapter"]["readers"]["kohya"].startswith("read it in part"), "the control"
