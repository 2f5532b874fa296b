"""Numbers that overflow are blamed on the file that they are from: the base, init_from, or the training adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.train.load_model import _require_finite


@pytest.mark.parametrize(("adapter", "name", "error", "where"), [
    ("default", "0.lora_B.default.weight", AdapterError, "lora.init_from: start.safetensors"),
    ("training_adapter", "0.lora_A.training_adapter.weight", AdapterError, "model.training_adapter: undo.safetensors"),
    ("default", "0.base_layer.weight", ModelError, "model.name_or_path: base"),
    ("default", "1.weight", ModelError, "model.name_or_path: base"),
])  # fmt: skip
def test_the_file_of_a_number_that_is_not_finite(adapter: str, name: str, error: type[Exception], where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), model, adapter)
    start: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float16,
        recipe=SimpleNamespace(
            model=SimpleNamespace(name_or_path="base", training_adapter="undo.safetensors"),
            lora=SimpleNamespace(init_from="start.safetensors"),
        ),
    )
    _require_finite(model, "unet", start)  # the control
    with torch.no_grad():
        model.get_parameter(name).fill_(torch.inf)
    with pytest.raises(error) as caught:
        _require_finite(model, "unet", start)
    assert where in str(caught.value)
