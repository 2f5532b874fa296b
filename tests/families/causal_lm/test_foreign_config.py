"""Configs that nobody should have written: every one ends in an error that names the file, and none takes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.base_models.meta_components import LARGE
from lora_rocm.errors import ModelError
from lora_rocm.families.causal_lm.family import CausalLM
from tests.families.causal_lm.adapted import recipe_of
from tests.tiny_llm import write_tiny_llm

SOON = ("model_type", "text_config", "layer_types", "quantization_config", "hidden_size", "vision_config", "tie_word_embeddings")  # fmt: skip  # noqa: E501
ODD: tuple[Any, ...] = (None, "x", [], ["llama"], {}, {"a": [1]}, -1, 1.5, True, 1e308)


def changed(folder: Path, config: dict[str, Any], **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"text_config": None}, "text_config"),
        ({"text_config": "x"}, "text_config"),
        ({"layer_types": {"a": 1}}, "layer_types"),
    ],
)
def test_a_value_of_another_type_is_named(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelError) as caught:
        _ = CausalLM(recipe_of(changed(folder, config, **values))).source
    assert caught.value.code == "config-unreadable" and caught.value.where == f"{folder / 'config.json'}: {key}"


@pytest.mark.parametrize("all_keys", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_no_value_of_any_key_is_a_bug(name: str, all_keys: bool, tmp_path: Path) -> None:
    """Each key in turn, of the config and of its text model: a model as before, or an error in words."""
    folder = write_tiny_llm(tmp_path, name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keys = [key for key in (config if all_keys else SOON)]
    for odd in ODD:
        for key in keys:
            cases = [{key: odd}]
            if "text_config" in config and (all_keys or key == "layer_types"):
                cases.append({"text_config": {**config["text_config"], key: odd}})
            for values in cases:
                try:
                    CausalLM(recipe_of(changed(folder, config, **values))).examine()
                except ModelError as error:
                    assert str(folder) in error.where, (values, error.where)  # noqa: PT017


class Largest(TorchDispatchMode):
    """Remembers the most elements of a new tensor with data."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type != "meta":
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize(
    ("name", "values", "code"),
    [
        ("llama", {"hidden_size": 1 << 24}, "weights-unfit"),
        ("llama", {"vocab_size": 1 << 24, "hidden_size": 1 << 16}, "weights-unfit"),
        ("qwen3_moe", {"num_experts": 60_000, "num_local_experts": 60_000}, "weights-unfit"),
        ("qwen3_moe", {"num_experts": 100_000}, "config-absurd"),
        ("qwen3_moe", {"num_hidden_layers": 3000}, "config-absurd"),
    ],
)
def test_absurd_sizes_take_no_memory(name: str, values: dict[str, Any], code: str, tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path, name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelError) as caught, Largest() as largest:
        CausalLM(recipe_of(changed(folder, config, **values))).examine()
    assert caught.value.code == code and largest.elements <= LARGE


def test_the_guard_of_memory_sees_a_large_tensor() -> None:
    """The control."""
    with Largest() as largest:
        torch.empty(LARGE + 1, dtype=torch.uint8)
    assert largest.elements > LARGE
