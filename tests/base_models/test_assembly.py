"""A component is built while its files are read: equal to one packed after loading, and never dense all at once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_rocm.base_models import safetensors_file
from lora_rocm.base_models.assembly import Assembly
from lora_rocm.base_models.conversion import Converter, State, computed, own_names, sources_of, traced
from lora_rocm.base_models.safetensors_file import READERS, read_hashed
from lora_rocm.base_models.stored_weights import ComponentTensors
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.kernels.quantised import ScaledRows, quantised
from lora_rocm.kernels.weight_format import DENSE, PackedLinear, WeightFormat, dense_weight, is_packed, pack
from lora_rocm.model_files.header import read_header
from tests.tiny_models import tiny_recipe

CPU = torch.device("cpu")
LAYERS, WIDTH = 72, 64


def stack(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))


def split(state: State, module: nn.Module) -> State:
    """As converters do: two layers of the component are one in the file, in the other order, and one is transposed."""
    second, first = state.pop("both.weight").chunk(2, dim=0)
    return {**state, "0.weight": first, "1.weight": second.T.contiguous()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in stack().state_dict().items()}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    state = dict(stack().state_dict())
    state["both.weight"] = torch.cat([state.pop("1.weight").T, state.pop("0.weight")])
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "fused.safetensors")
    return tmp_path / "fused.safetensors"


def loaded(path: Path, weights: WeightFormat, converter: Converter = own_names) -> nn.Module:
    header, module = read_header(path), stack("meta")
    tensors = ComponentTensors([header], "")
    made = traced(tensors.entries, module, converter)
    assembly = Assembly(module, made, weights, torch.float32, tensors.stored)
    read_hashed([header], lambda name: True, assembly.take, assembly.reusable)
    return assembly.finished()


def packed_afterwards(name: str) -> nn.Module:
    module = stack().requires_grad_(False)
    pack(module, quantised(name, ""))
    return module


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    assert [type(module) for module in found.modules()] == [type(module) for module in expected.modules()]
    assert found.state_dict().keys() == expected.state_dict().keys() and not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())
    tensors = found.state_dict()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(tensors[key], tensor), key


@pytest.mark.parametrize("name", ["none", "int8", "fp8", "nf4"])
def test_equals_what_is_packed_after_loading(file: Path, fused: Path, name: str) -> None:
    expected = packed_afterwards(name)
    assert_equal(loaded(file, quantised(name, "")), expected)
    assert_equal(loaded(fused, quantised(name, ""), split), expected)


def test_plain_fp8_is_not_rounded_again(tmp_path: Path) -> None:
    """A plain cast has no scales. Scales of rows would change what it has (the control)."""
    state = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in stack().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    layers = [loaded(tmp_path / "w.safetensors", quantised("fp8", "")).get_submodule(f"{n}") for n in range(2)]
    for number, layer in enumerate(layers):
        wanted = state[f"{number}.weight"].float()
        assert is_packed(layer) and torch.equal(dense_weight(layer), wanted)
        again = nn.Linear(WIDTH, WIDTH, bias=False)
        again.weight = nn.Parameter(wanted)
        assert not torch.equal(dense_weight(quantised("fp8", "").packed(again)), wanted)


def test_codes_of_an_int8_file_are_kept_unless_products_need_rotated_ones(tmp_path: Path) -> None:
    packed = [quantised("int8", "").packed(layer) for layer in stack() if isinstance(layer, nn.Linear)]
    file = tmp_path / "w.safetensors"
    codes = {f"{number}.weight": layer.weight.data for number, layer in enumerate(packed)}
    scales = {f"{number}.weight_scale": layer.get_buffer("weight_scale") for number, layer in enumerate(packed)}
    rest = {key: tensor for key, tensor in stack().state_dict().items() if key not in codes}
    save_file(rest | codes | scales, file)
    for compute, kept in (("bf16", True), ("int8", False)):
        module = loaded(file, quantised("int8", "", compute))
        for number, layer in enumerate(packed):
            found = module.get_submodule(f"{number}")
            assert torch.equal(found.weight, layer.weight) == kept  # type: ignore[arg-type]
            torch.testing.assert_close(dense_weight(found), dense_weight(layer), atol=0.01, rtol=0)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8")), "nf4"])
def test_a_model_of_a_family_too(tiny_sdxl: Path, name: str) -> None:
    at_once = Sdxl(tiny_recipe(tiny_sdxl, model={"quantization": name})).load(torch.bfloat16, CPU).components["unet"]
    family = Sdxl(tiny_recipe(tiny_sdxl))
    later = family.load(torch.bfloat16, CPU).components["unet"]
    pack(later, quantised(name, r"\.transformer_blocks\."))
    assert_equal(at_once, later)
    assert sum(is_packed(layer) for layer in at_once.modules()) > 50


@dataclass(frozen=True)
class Counting(ScaledRows):
    """int8 that counts the dense weights which exist when a layer is packed."""

    seen: list[Any] = field(default_factory=list, compare=False)
    alive: list[int] = field(default_factory=list, compare=False)

    def packed(self, layer: nn.Linear) -> PackedLinear:
        self.seen.append(weakref.ref(layer.weight))
        self.alive.append(sum(weight() is not None for weight in self.seen))
        return super().packed(layer)


def most_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors that exist, noted at each read."""
    alive, empty = [], torch.empty
    seen: list[Any] = []

    def counted(*size: Any, **how: Any) -> Tensor:
        made = empty(*size, **how)
        if made.numel() >= WIDTH * WIDTH and "device" not in how:  # modules name one
            seen.append(weakref.ref(made))
            alive.append(sum(tensor() is not None for tensor in seen))
        return made

    monkeypatch.setattr(safetensors_file.torch, "empty", counted)
    return alive


def test_few_dense_weights_exist_at_a_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Counting("")
    read = most_read(monkeypatch)
    loaded(file, weights)
    assert len(weights.alive) == LAYERS
    assert max(weights.alive) <= READERS < LAYERS / 2, "what the threads pack"
    assert len(read) <= READERS, "each thread reads into the same memory again"


def test_loading_before_packing_is_seen(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the count."""
    weights = Counting("")
    read = most_read(monkeypatch)
    module = loaded(file, DENSE)
    kept = [*module.parameters()]
    pack(module, weights)
    assert len(read) == max(read) == max(weights.alive) == LAYERS and len(kept) > LAYERS


def test_every_way_to_compute_a_tensor_is_recorded(fused: Path) -> None:
    header, module = read_header(fused), stack("meta")
    made = traced(header.tensors, module, split)
    assert sources_of(made["1.weight"]) == {"both.weight"} and made["1.weight"].is_meta
    both = torch.arange(2.0 * WIDTH * WIDTH).view(2 * WIDTH, WIDTH)
    read = {"both.weight": both}
    assert torch.equal(computed(made["0.weight"], read), both[WIDTH:])
    assert torch.equal(computed(made["1.weight"], read), both[:WIDTH].T)
    joined = torch.cat([made["0.weight"], made["1.weight"]], dim=1)[:, 1:].mul(other=2)
    assert torch.equal(computed(joined, read), torch.cat([both[WIDTH:], both[:WIDTH].T], dim=1)[:, 1:] * 2)
    constant = torch.ones(3)
    assert computed(constant, read) is constant and not sources_of(constant)
