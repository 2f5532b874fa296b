"""A part of a stored weight that is missing, or of another size or type, is refused by a header or changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM

from lora_rocm.base_models import conversion
from lora_rocm.base_models.conversion import State
from lora_rocm.base_models.loading import BaseSource, ComponentLayout, ModelLayout
from lora_rocm.errors import ModelError
from lora_rocm.families.causal_lm.gpt_oss import PackedExperts
from lora_rocm.families.common.component_check import check_component
from lora_rocm.kernels.quantised import quantised
from lora_rocm.model_files.config_file import Config
from tests.base_models.test_stored_weights import UNET, as_bytes, fp8_new, fp8_old, int8_rows, nf4, nf4_plain

CPU = torch.device("cpu")
ROWS, COLUMNS = 32, 640  # 320 blocks of 64, so two nested ones
LAYERS = ("first", "embedded", "last")


class OneComponent(BaseSource):
    """A base of three square and other layers, or of gpt-oss' experts."""

    made: Callable[[], nn.Module]

    def config(self, name: str) -> Config:
        return Config({}, self.config_path(name))

    def _meta_component(self, name: str, shared: bool = False) -> nn.Module:
        with torch.device("meta"):
            return self.made()


def layers() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(COLUMNS, ROWS, bias=False) for name in LAYERS})


def experts() -> nn.Module:
    config = GptOssConfig(
        num_local_experts=2, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=8,
    )  # fmt: skip
    return PackedExperts(config, GptOssForCausalLM(config).model.layers[0].mlp.experts)


def source(folder: Path, form: str) -> OneComponent:
    part = ComponentLayout(nn.Module, "", conversion.own_names)
    found = OneComponent("base", ModelLayout({"layer": part}, {}, folder), folder, None)
    object.__setattr__(found, "made", experts if form == "mxfp4" else layers)
    return found


def written(tensors: State, folder: Path, form: str) -> OneComponent:
    (folder / "layer").mkdir(exist_ok=True)
    named = {name.removeprefix(UNET): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "layer" / "model.safetensors")
    return source(folder, form)


def loaded(found: OneComponent) -> State:
    module = found.load("layer", torch.float32, CPU)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def undescribed(tensors: State) -> None:
    """A file of scaled fp8 with a scale for each row, and nothing that describes it."""
    fp8_old(tensors)
    for name in [name for name in tensors if name.endswith(("scale_input", "scaled_fp8"))]:
        del tensors[name]
    for name in [name for name in tensors if name.endswith(".scale_weight")]:
        tensors[name] = tensors[name].expand(ROWS, 1).clone()


FORMS = {
    "fp8": fp8_old,
    "fp8 undescribed": undescribed,
    "fp8 as bytes": fp8_new,
    "int8": int8_rows,
    "nf4": nf4,
    "nf4 plain": nf4_plain,
    "mxfp4": None,
}
TYPES = (torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64)


def whole(form: str) -> State:
    rng = torch.Generator().manual_seed(1)
    if form == "mxfp4":
        made = {name: (tensor.shape, tensor.dtype) for name, tensor in experts().state_dict().items()}
        codes = {name: torch.randint(100, 130, shape, generator=rng) for name, (shape, _) in made.items()}
        return {name: codes[name].to(dtype) * (not dtype.is_floating_point) for name, (_, dtype) in made.items()}
    tensors = {f"{UNET}{name}.weight": torch.randn(ROWS, COLUMNS, generator=rng) for name in LAYERS}
    FORMS[form](tensors)  # type: ignore[misc]
    return tensors


def perturbed(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """(what was done, the tensor or None) for every kind of damage to one part."""
    yield "dropped", None
    flat = tensor.flatten()
    if len(flat) > 1:
        yield "shortened", flat[:-1].clone()
        yield "shortened in its rows", tensor[:-1].clone()
    yield "lengthened", torch.cat([flat.view(torch.uint8), flat[:1].view(torch.uint8)]).view(tensor.dtype)
    if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        yield "turned", tensor.T.contiguous()
    yield "as one row", flat[None].clone()
    for dtype in TYPES:
        if dtype.itemsize == tensor.dtype.itemsize and dtype is not tensor.dtype and tensor.ndim:
            yield f"seen as {dtype}", tensor.view(dtype)
        elif dtype is not tensor.dtype:
            yield f"converted to {dtype}", tensor.float().to(dtype)


def outcome(found: OneComponent) -> ModelError | None:
    """The refusal of ``check``; None: it accepts the base."""
    try:
        check_component(found, "layer", "Use another.")
    except ModelError as error:
        return error
    return None


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_part_is_refused_or_changes_nothing(tmp_path: Path, form: str) -> None:
    tensors = whole(form)
    assert outcome(written(tensors, tmp_path, form)) is None, "the control"
    wanted = loaded(source(tmp_path, form))
    parts = [name for name in tensors if "first" in name or form == "mxfp4" or name.endswith("scaled_fp8")]
    refused = 0
    for name in parts:
        for what, tensor in perturbed(tensors[name]):
            changed = {key: value for key, value in tensors.items() if key != name}
            found = written(changed if tensor is None else {**changed, name: tensor}, tmp_path, form)
            error = outcome(found)
            if error is not None:
                said, bare = f"{error.what} {error.where}", name.removeprefix(UNET)
                assert bare in said or "first" in said, (name, what, said)
                refused += 1
                continue
            now = loaded(found)
            assert now.keys() == wanted.keys(), (name, what)
            assert all(torch.equal(now[key], wanted[key]) for key in now), (name, what)
    assert refused > 3 * len(parts) or form == "fp8"


STATE = f"{UNET}first.weight.quant_state.bitsandbytes__nf4"
WRONG: dict[str, list[Any]] = {
    "shape": [None, [], [ROWS], [COLUMNS, ROWS], [ROWS, COLUMNS + 1], [0, 0], [True, COLUMNS], "32", [2**40, 2**40]],
    "blocksize": [None, 0, -64, 63, 128, 2**40, "64", True, [64], 64.0],
    "nested_blocksize": [None, 0, 128, 2**40, "256", True],
    "nested_offset": [None, "abc", [0.1], True, float("nan"), float("inf"), 3e38, {}, 10**400],
    "quant_type": [None, "int4", 4, ["nf4"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_a_wrong_description_of_four_bits_is_refused_by_check(tmp_path: Path, key: str, value: object) -> None:
    tensors = whole("nf4")
    state = json.loads(bytes(tensors[STATE].tolist()))
    tensors[STATE] = as_bytes({name: each for name, each in {**state, key: value}.items() if each is not None})
    error = outcome(written(tensors, tmp_path, "nf4"))
    assert error is not None and error.code in ("weights-damaged", "weights-quantised", "weights-unfit")
    assert "first" in f"{error.what} {error.where}"


def test_a_scale_for_each_column_of_a_square_weight_is_refused(tmp_path: Path) -> None:
    """There are as many scales as outputs."""
    tensors = whole("int8")
    tensors[f"{UNET}first.weight_scale"] = tensors[f"{UNET}first.weight_scale"].reshape(1, ROWS)
    error = outcome(written(tensors, tmp_path, "int8"))
    assert error is not None and error.code == "weights-quantised" and "first.weight_scale" in error.where


NUMBERS = [
    ("fp8", "first.scale_weight"),
    ("fp8 as bytes", "first.weight_scale"),
    ("int8", "first.weight_scale"),
    ("nf4", "first.weight.nested_absmax"),
    ("nf4", "first.weight.nested_quant_map"),
    ("nf4", "first.weight.quant_map"),
    ("nf4 plain", "first.weight.absmax"),
    ("nf4 plain", "first.weight.quant_map"),
]


@pytest.mark.parametrize(("form", "name"), NUMBERS)
@pytest.mark.parametrize(("value", "code"), [
    (float("nan"), "weights-not-finite"), (float("inf"), "weights-not-finite"), (3e38, "weights-implausible"),
    (-3e38, "weights-implausible"), (1e6, "weights-implausible"),
])  # fmt: skip
def test_numbers_that_no_weight_has_are_refused_by_check_and_by_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str, value: float, code: str
) -> None:
    tensors = whole(form)
    part = tensors[UNET + name].clone()
    part.view(-1)[-1] = value
    found = written({**tensors, UNET + name: part}, tmp_path, form)
    error = outcome(found)
    assert error is not None and error.code == code and name in error.what
    monkeypatch.setattr("lora_rocm.base_models.stored_weights.MAX_SMALL_PART", 0)  # as of a part that is too large
    large = source(tmp_path, form)
    assert outcome(large) is None
    for weights in ("none", "nf4", "int8"):
        with pytest.raises(ModelError) as caught:
            large.load("layer", torch.float32, CPU, quantised(weights, ""))
        assert caught.value.code == code and caught.value.exit_code == 2


def test_one_weight_is_described_once(tmp_path: Path) -> None:
    tensors = whole("fp8")
    tensors[f"{UNET}first.weight_scale"] = torch.ones(())
    error = outcome(written(tensors, tmp_path, "fp8"))
    assert error is not None and error.code == "weights-damaged" and "first" in error.what


def test_a_table_of_tokens_may_have_no_scale(tmp_path: Path) -> None:
    """Files of text encoders are like that."""
    tensors = whole("fp8")
    del tensors[f"{UNET}embedded.scale_weight"], tensors[f"{UNET}embedded.scale_input"]
    assert outcome(written(tensors, tmp_path, "fp8")) is None
