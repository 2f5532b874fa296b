"""Configs of what no model is are refused before anything is made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.errors import ModelError
from lora_rocm.model_files.config_file import MAX_LAYERS, require_bounded


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_layers", "num_single_layers", "n_layers"])
def test_more_layers_than_any_model_has(key: str) -> None:
    require_bounded({key: 60}, Path("config.json"))
    with pytest.raises(ModelError, match="no model has"):
        require_bounded({key: MAX_LAYERS + 1}, Path("config.json"))
