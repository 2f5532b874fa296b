"""Numbers that overflow are blamed on the file that they are from: the base, init_from, or the training adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.train.load_model import _largest, _require_finite


@pytest.mark.parametrize(("adapter", "name", "error", "where"), [
    ("default", "0.lora_B.default.weight", AdapterError, "lora.init_from: start.safetensors"),
    ("training_adapter", "0.lora_A.training_adapter.weight", AdapterError, "model.training_adapter: undo.safetensors"),
    ("default", "0.base_layer.weight", ModelError, "model.name_or_path: base"),
    ("default", "1.weight", ModelError, "model.name_or_path: base"),
])  # fmt: skip
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_file_of_a_number_that_is_not_finite(
    adapter: str, name: str, error: type[Exception], where: str, number: float, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(dtype)
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
        model.get_parameter(name).view(-1)[1].fill_(number)
    with pytest.raises(error) as caught:
        _require_finite(model, "unet", start)
    assert where in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [0, 70_000, -1])
def test_it_is_found_on_a_gpu_among_many_weights(number: float, dtype: torch.dtype, place: int) -> None:
    """Among weights of other sizes, and one in main memory."""
    weights = {str(size): torch.ones(size, device="cuda", dtype=dtype) for size in (1, 100_000, 3, 200_000)}
    weights["host"] = torch.ones(5, dtype=dtype)
    assert _largest(weights, torch.device("cuda")) == dict.fromkeys(weights, 1.0)
    weights["200000"][place] = number
    found = _largest(weights, torch.device("cuda"))
    assert not found.pop("200000") < torch.inf and set(found.values()) == {1.0}
