"""Weights that files store with scales are read unchanged, or converted to the recipe's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.base_models.assembly import Assembly
from lora_rocm.base_models.conversion import State, traced
from lora_rocm.base_models.safetensors_file import read_hashed
from lora_rocm.base_models.stored_weights import ComponentTensors
from lora_rocm.errors import ModelError
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.kernels.nf4_codes import LEVELS
from lora_rocm.kernels.quantised import dynamic_map, quantised
from lora_rocm.kernels.weight_format import PackedLinear, WeightFormat, dense_weight
from lora_rocm.model_files.header import read_header
from tests.tiny_models import read_json, tiny_pipeline, tiny_recipe, write_config_folder, write_single_file
from tests.wording import Worded, says, worded

CPU = torch.device("cpu")
UNET = "model.diffusion_model."
LAYER = f"{UNET}input_blocks.3.1.transformer_blocks.0.attn1.to_q"
PATH = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
Edit = Callable[[State], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(one-file checkpoint, folder with its configs and tokenizers)."""
    folder = tmp_path_factory.mktemp("stored")
    pipeline = tiny_pipeline(unet={"transformer_layers_per_block": (1, 1, 1)})
    return write_single_file(pipeline, folder / "x.safetensors"), write_config_folder(pipeline, folder / "config")


def as_bytes(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def matrices(tensors: State) -> list[str]:
    return [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 2]


def fp8_old(tensors: State) -> None:
    """ComfyUI's first format: one scale per weight, and a marker."""
    for name in matrices(tensors):
        if name.startswith(UNET):
            factor = tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / factor).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = factor
            tensors[name.removesuffix("weight") + "scale_input"] = torch.ones(())
    tensors[f"{UNET}scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)


def fp8_new(tensors: State) -> None:
    """Its second one: codes as bytes, described by JSON."""
    fp8_old(tensors)
    del tensors[f"{UNET}scaled_fp8"]
    for name in [name for name in tensors if name.endswith(".scale_weight")]:
        base = name.removesuffix(".scale_weight")
        tensors[f"{base}.weight_scale"] = tensors.pop(name).reshape(1)
        tensors[f"{base}.weight"] = tensors[f"{base}.weight"].view(torch.uint8)
        tensors[f"{base}.comfy_quant"] = as_bytes({"format": "float8_e4m3fn"})


def int8_rows(tensors: State) -> None:
    for name in matrices(tensors):
        if name.startswith(UNET):
            factor = tensors[name].abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensors[name] / factor).round().to(torch.int8)
            tensors[name.removesuffix("weight") + "weight_scale"] = factor
            tensors[name.removesuffix("weight") + "comfy_quant"] = as_bytes({"format": "int8_tensorwise"})


def nf4(tensors: State, nested: bool = True) -> None:
    """As bitsandbytes writes it; the layers that cannot be stored so stay as they are."""
    for name in matrices(tensors):
        if name.startswith(UNET) and tensors[name].numel() % 64 == 0 and tensors[name].shape[1] % 2 == 0:
            rows, width = tensors[name].shape
            layer = nn.Linear(width, rows, bias=False)
            layer.weight = nn.Parameter(tensors[name], requires_grad=False)
            packed, blocks = quantised("nf4", "").packed(layer), tensors[name].numel() // 64
            state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, width]}
            tensors[name] = packed.weight.data.view(torch.uint8).view(-1, 1)
            tensors[f"{name}.quant_map"] = torch.tensor(LEVELS)
            tensors[f"{name}.absmax"] = quantised("nf4", "").magnitudes(packed)[:blocks]  # type: ignore[attr-defined]
            if nested:
                state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(packed.offset)}
                tensors[f"{name}.absmax"] = packed.get_buffer("nested_codes")[:blocks]
                tensors[f"{name}.nested_absmax"] = packed.get_buffer("nested")
                tensors[f"{name}.nested_quant_map"] = torch.tensor(dynamic_map())
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = as_bytes(state)


def nf4_plain(tensors: State) -> None:
    nf4(tensors, nested=False)


FORMS: dict[str, tuple[Edit, str]] = {
    "fp8": (fp8_old, "fp8"),
    "fp8 as bytes": (fp8_new, "fp8"),
    "int8": (int8_rows, "int8"),
    "nf4": (nf4, "nf4"),
    "nf4 with float magnitudes": (nf4_plain, "nf4"),
}


def base(checkpoint: tuple[Path, Path], tmp_path: Path, edit: Edit, quantization: str = "none") -> tuple[Sdxl, State]:
    tensors = load_file(checkpoint[0])
    edit(tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    choice = {"config": str(checkpoint[1]), "quantization": quantization}
    return Sdxl(tiny_recipe(tmp_path / "x.safetensors", model=choice)), tensors


def dense_of(checkpoint: tuple[Path, Path], path: Path) -> Sdxl:
    """The base in a file without a special format."""
    return Sdxl(tiny_recipe(path, model={"config": str(checkpoint[1]), "quantization": "none"}))


@pytest.mark.parametrize("form", FORMS)
def test_layers_stay_as_stored_and_dense_ones_are_what_the_file_means(
    checkpoint: tuple[Path, Path], tmp_path: Path, form: str
) -> None:
    edit, name = FORMS[form]
    family, tensors = base(checkpoint, tmp_path, edit, name)
    as_dense = dense_of(checkpoint, tmp_path / "x.safetensors")
    (said,) = as_dense.notices
    assert "unet" in said and name in said and "model.quantization" in said
    dense = as_dense.load(torch.float32, CPU).components["unet"].get_submodule(PATH).weight
    original = load_file(checkpoint[0])[f"{LAYER}.weight"]
    error = (dense - original).norm() / original.norm()
    assert 0.002 < error < {"fp8": 0.04, "int8": 0.01, "nf4": 0.12}[name]
    unet = family.load(torch.float32, CPU).components["unet"]
    layers = [layer for layer in unet.modules() if isinstance(layer, PackedLinear)]
    assert len(layers) > 50 and {layer.weight_format.name for layer in layers} == {name}
    found, stored = unet.get_submodule(PATH), tensors[f"{LAYER}.weight"]
    assert isinstance(found, PackedLinear)
    assert torch.equal(found.weight.view(torch.uint8).flatten(), stored.view(torch.uint8).flatten())
    torch.testing.assert_close(dense_weight(found), dense, rtol=0.01 if "float" in form else 1e-6, atol=1e-7)


def test_another_format_than_that_of_the_file_is_made_of_its_numbers(
    checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    dense = base(checkpoint, tmp_path, fp8_old)[0].load(torch.float32, CPU).components["unet"].get_submodule(PATH)
    family, _ = base(checkpoint, tmp_path, fp8_old, "int8")
    layer = family.load(torch.float32, CPU).components["unet"].get_submodule(PATH)
    assert isinstance(layer, PackedLinear) and layer.weight_format.name == "int8"
    torch.testing.assert_close(dense_weight(layer), dense.weight, rtol=0, atol=float(dense.weight.abs().max()) / 127)


def split(state: State, module: nn.Module) -> State:
    """Two layers of the component are one in the file; the second is also transposed."""
    first, second = state.pop("both.weight").chunk(2, dim=0)
    return {**state, "0.weight": first, "1.weight": second.T.contiguous()}


def loaded(path: Path, weights: WeightFormat) -> nn.Module:
    tensors = ComponentTensors([read_header(path)], "")
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    assembly = Assembly(module, traced(tensors.entries, module, split), weights, torch.float32, tensors.stored)
    read_hashed(tensors.headers, lambda name: True, assembly.take, assembly.reusable)
    return assembly.finished()


def test_rows_of_a_split_weight_keep_their_codes_and_scales(tmp_path: Path) -> None:
    """A part that does not consist of whole rows is packed again."""
    codes = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).mul(99).to(torch.float8_e4m3fn)
    scale = torch.rand(128, generator=torch.Generator().manual_seed(1)) + 0.1
    save_file({"both.weight": codes, "both.weight_scale": scale}, tmp_path / "x.safetensors")
    exact = codes.float() * scale[:, None]
    first, second = loaded(tmp_path / "x.safetensors", quantised("fp8", "")).children()
    assert torch.equal(dense_weight(first), exact[:64])
    assert torch.equal(first.weight.flatten(), codes[:64].view(torch.int8).flatten())
    off = dense_weight(second) - exact[64:].T
    assert 0 < off.norm() / exact[64:].norm() < 0.03
    for layer, wanted in zip(loaded(tmp_path / "x.safetensors", quantised("none", "")), exact.split(64), strict=True):
        assert torch.equal(layer.weight, wanted if layer.weight[0, 1] == wanted[0, 1] else wanted.T)


def test_a_folder_of_bitsandbytes(checkpoint: tuple[Path, Path], tiny_sdxl: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))
    config, path = folder / "unet" / "config.json", folder / "unet" / "diffusion_pytorch_model.safetensors"
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config.write_text(json.dumps({**read_json(config), "quantization_config": method}), encoding="utf-8")
    tensors = {UNET + name: tensor for name, tensor in load_file(path).items()}
    nf4(tensors)
    save_file({name.removeprefix(UNET): tensor for name, tensor in tensors.items()}, path)
    unet = Sdxl(tiny_recipe(folder, model={"quantization": "nf4"})).load(torch.float32, CPU).components["unet"]
    layer = unet.get_submodule(PATH)
    assert isinstance(layer, PackedLinear)
    assert torch.equal(layer.weight.flatten(), tensors[f"{UNET}{PATH}.weight"].view(torch.int8).flatten())


def turned(tensors: State) -> None:
    int8_rows(tensors)
    tensors[f"{LAYER}.comfy_quant"] = as_bytes({"format": "int8_tensorwise", "params": {"convrot": True}})


def of_nvidia(tensors: State) -> None:
    int8_rows(tensors)
    tensors[f"{LAYER}.comfy_quant"] = as_bytes({"format": "nvfp4"})


def in_blocks(tensors: State) -> None:
    int8_rows(tensors)
    tensors[f"{LAYER}.weight_scale"] = torch.ones(3, 2)


def no_json(tensors: State) -> None:
    int8_rows(tensors)
    tensors[f"{LAYER}.comfy_quant"] = torch.zeros(20, dtype=torch.uint8)


def without_map(tensors: State) -> None:
    nf4(tensors)
    del tensors[f"{LAYER}.weight.quant_map"]


def too_few(tensors: State) -> None:
    nf4(tensors)
    tensors[f"{LAYER}.weight.absmax"] = tensors[f"{LAYER}.weight.absmax"][1:]


@pytest.mark.parametrize(("edit", "code", "words"), [
    (turned, "weights-quantised", worded("base_models/rotation")),
    (of_nvidia, "weights-quantised", worded("base_models/nvfp4")),
    (in_blocks, "weights-quantised", worded("base_models/blocks")),
    (no_json, "weights-damaged", worded("base_models/no-json")),
    (without_map, "weights-damaged", worded("base_models/quant-map-does-not-fit")),
    (too_few, "weights-damaged", worded("base_models/absmax-does-not-fit")),
])  # fmt: skip
def test_what_is_not_read_or_does_not_fit_is_refused_by_the_header(
    checkpoint: tuple[Path, Path], tmp_path: Path, edit: Edit, code: str, words: Worded
) -> None:
    family, _ = base(checkpoint, tmp_path, edit)
    with pytest.raises(ModelError) as caught:
        _ = family.source
    assert caught.value.code == code and says(caught.value.what, words) and "x.safetensors" in caught.value.where


def test_gguf_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "model-Q4_K_S.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe(path)).source
    assert caught.value.code == "gguf-refused" and "model.quantization: nf4" in caught.value.fix
