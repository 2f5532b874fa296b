"""The way by which PEFT takes our linear layer is not public: this pins what we need of it."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Conv2d, Linear
from torch import nn

from lora_rocm.kernels.lora_layer import LoraLinear, with_lean_layers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv2d(4, 6, 1)


def injected(lean: bool) -> Model:
    config = LoraConfig(r=2, target_modules=["linear", "conv"])
    model = Model().requires_grad_(False)
    inject_adapter_in_model(with_lean_layers(config) if lean else config, model)
    return model


def test_peft_takes_our_class_for_linear_layers_and_for_nothing_else() -> None:
    ours, plain = injected(lean=True), injected(lean=False)
    assert type(ours.linear) is LoraLinear and type(ours.conv) is Conv2d
    assert type(plain.linear) is Linear and type(plain.conv) is Conv2d, "the control"
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert ours.linear.scaling == plain.linear.scaling and ours.linear.r == plain.linear.r


def test_the_registration_is_the_one_we_know_and_leaves_no_trace_in_a_file() -> None:
    assert list(inspect.signature(LoraConfig._register_custom_module).parameters) == ["self", "mapping"]
    written = json.dumps(with_lean_layers(LoraConfig(r=2)).to_dict(), default=str)
    assert "LoraLinear" not in written


@pytest.mark.parametrize(
    ("spoil", "is_plain"),
    [
        (lambda layer: None, True),
        (lambda layer: layer.enable_adapters(False), False),
        (lambda layer: layer.merge(), False),
        (lambda layer: layer.lora_A.double(), False),
        (lambda layer: layer.base_layer.weight.requires_grad_(True), True),  # ``forward`` itself turns away
    ],
)
def test_what_is_not_the_plain_case_goes_the_way_of_peft(spoil: object, is_plain: bool) -> None:
    layer = injected(lean=True).linear
    assert isinstance(layer, LoraLinear) and callable(spoil)
    spoil(layer)
    assert (layer.plain(torch.zeros(1, 4)) is not None) is is_plain
