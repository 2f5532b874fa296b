"""Formats of weights that nothing here reads are refused by name; rounded ones are read, with a notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.errors import ModelError
from lora_rocm.families.sdxl.family import LAYOUT, Sdxl
from tests.tiny_models import read_json, tiny_pipeline, tiny_recipe, write_config_folder, write_single_file
from tests.wording import Worded, says, worded

CPU = torch.device("cpu")
UNET = "model.diffusion_model."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(one-file checkpoint, folder with its configs and tokenizers)."""
    folder, pipeline = tmp_path_factory.mktemp("stored"), tiny_pipeline()
    return write_single_file(pipeline, folder / "x.safetensors"), write_config_folder(pipeline, folder / "config")


def int8_plain(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(UNET) and tensors[name].ndim == 2]:
        tensors[name] = (tensors[name] * 100).to(torch.int8)


def one_bias_of_whole_numbers(tensors: dict[str, Tensor]) -> None:
    tensors["first_stage_model.decoder.conv_in.bias"] = tensors["first_stage_model.decoder.conv_in.bias"].long()


def gptq(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UNET}input_blocks.4.1.proj_in.qweight"] = torch.zeros(20, dtype=torch.int32)


def eight_bits(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UNET}input_blocks.4.1.proj_in.SCB"] = torch.zeros(20)


@pytest.mark.parametrize(("change", "words"), [
    (int8_plain, worded("model_files/whole-numbers-i8")),
    (one_bias_of_whole_numbers, worded("model_files/whole-numbers-i64")),
    (gptq, worded("model_files/gptq-or-awq")),
    (eight_bits, worded("model_files/bitsandbytes-in-8-bits")),
])  # fmt: skip
def test_forms_that_are_not_read(
    checkpoint: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: Worded
) -> None:
    tensors = load_file(checkpoint[0])
    change(tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(tmp_path / "x.safetensors", model={"config": str(checkpoint[1])})).source
    assert caught.value.code == "weights-quantised"
    assert says(caught.value.what, words) and "x.safetensors" in caught.value.where and "float16" in caught.value.fix


@pytest.mark.parametrize(("dtype", "words"), [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")])
def test_rounded_weights_are_read_and_told_once(
    checkpoint: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype, words: str
) -> None:
    tensors = load_file(checkpoint[0])
    tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if name.startswith(UNET)}
    save_file(tensors, tmp_path / "x.safetensors")
    family = Sdxl(tiny_recipe(tmp_path / "x.safetensors", model={"config": str(checkpoint[1])}))
    (said,) = family.notices
    assert "unet" in said and words in said and "rounded" in said
    loaded: Any = family.source.load("unet", torch.bfloat16, CPU)
    stored = tensors[f"{UNET}input_blocks.0.0.weight"]
    assert torch.equal(loaded.conv_in.weight, stored.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_other_float_is_silent(checkpoint: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(checkpoint[0]).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    assert not Sdxl(tiny_recipe(tmp_path / "x.safetensors", model={"config": str(checkpoint[1])})).notices


@pytest.mark.parametrize("component", list(LAYOUT.parts))
@pytest.mark.parametrize("config", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "bitsandbytes"}, "\x1b[1m"])
def test_a_config_of_quantised_weights(tiny_sdxl: Path, tmp_path: Path, component: str, config: Any) -> None:
    folder = Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))
    path = folder / component / "config.json"
    path.write_text(json.dumps({**read_json(path), "quantization_config": config}), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(folder)).source
    assert caught.value.code == "weights-quantised" and component in caught.value.where
    named = config["quant_method"] if isinstance(config, dict) else "[1m"
    assert named in caught.value.what and "\x1b" not in str(caught.value)
