"""Files of LyCORIS' kinds, read and applied by LyCORIS' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.modules import IA3Module, get_module, make_module
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_rocm.export import writers
from lora_rocm.export.metadata import Facts
from tests.tiny_models import trained, write_tiny_sdxl

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TARGETS = r"mid_block\.(attentions\.0\.proj_in|resnets\.0\.conv1)|down_blocks\.1\.downsamplers\.0\.conv"
KINDS: dict[str, dict[str, Any]] = {
    "LoKr, both factors whole": {"type": "lokr", "rank": 64, "alpha": 2.0},
    "LoKr, one whole": {"type": "lokr", "rank": 2, "alpha": 1.0},
    "LoKr, none whole": {"type": "lokr", "rank": 1, "alpha": 0.5, "decompose_both": True, "factor": 4},
    "OFT": {"type": "oft", "rank": 8, "constraint": 0.05},
    "IA3": {"type": "ia3"},
    "LoHa": {"type": "loha", "rank": 3, "alpha": 2.0},
}


PARTS = ("lokr_w1", "lokr_w1_a", "oft_blocks", "weight", "hada_w1_a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl")


def by_lycoris(tensors: dict[str, Tensor], key: str, base: nn.Module, x: Tensor) -> Tensor:
    """What a layer with the file's module computes in LyCORIS."""
    kind, weights = get_module(tensors, key)
    if kind is IA3Module:  # its own loader fails on the second tensor, so it is loaded as a resumed training does
        with pytest.raises(TypeError):
            make_module(kind, weights, key, base)
        module = IA3Module(key, base, 1)
        module.load_state_dict({name: tensors[f"{key}.{name}"] for name in ("weight", "on_input")})
    else:
        module = make_module(kind, weights, key, base)
    module.org_forward = base.forward
    output: Tensor = module(x)
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_lycoris_reads_the_file_with_equal_effect(folder: Path, tmp_path: Path, kind: str) -> None:
    family, _, adapter = trained(folder, lora={"targets": TARGETS, **KINDS[kind]}, output={"dtype": "fp32"})
    writers.write("kohya", tmp_path / "x.safetensors", family, adapter, family.recipe, Facts(1, 1, 1))
    tensors = load_file(tmp_path / "x.safetensors")
    table = adapter.key_table("kohya")
    keys = {table.whole(key): key for key in table.parts if any(name.startswith(f"{key}.") for name in tensors)}
    assert keys.keys() == adapter.modules.keys() and len(keys) == 3
    for name, (_, _, layer) in adapter.modules.items():
        base = layer.get_base_layer()
        x = torch.randn(2, base.in_channels, 4, 4) if isinstance(base, nn.Conv2d) else torch.randn(2, base.in_features)
        torch.testing.assert_close(by_lycoris(tensors, keys[name], base, x), layer(x), rtol=1e-4, atol=1e-5)
        part = next(ending for ending in PARTS if f"{keys[name]}.{ending}" in tensors)
        wrong = tensors | {f"{keys[name]}.{part}": tensors[f"{keys[name]}.{part}"] * 1.1}
        assert not torch.allclose(by_lycoris(wrong, keys[name], base, x), layer(x), atol=1e-3), "the control"
