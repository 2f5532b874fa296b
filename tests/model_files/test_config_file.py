"""Configs that belong to no model are refused before anything is made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.errors import ModelError
from lora_rocm.model_files.config_file import MAX_LAYERS, read_config, require_bounded
from tests.wording import Worded, saying, worded


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_layers", "num_single_layers", "n_layers"])
def test_more_layers_than_any_model_has(key: str) -> None:
    require_bounded({key: 60}, Path("config.json"))
    with pytest.raises(ModelError, check=saying("model_files/no-model-has")):
        require_bounded({key: MAX_LAYERS + 1}, Path("config.json"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a": {"b": 1, "b": 2}}', worded("model_files/key-b-twice")),
        ('{"a": ' + "9" * 6000 + "}", worded("model_files/too-many-digits")),
        ("[" * 99_999, worded("model_files/nested-too-deep")),
        ("{", worded("model_files/no-json")),
    ],
)
def test_a_config_that_cannot_be_read_says_why(content: str, reason: Worded, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, check=saying(reason)) as caught:
        read_config(path)
    assert caught.value.code == "config-unreadable" and str(path) in str(caught.value)
