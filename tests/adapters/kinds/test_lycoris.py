"""Files of LyCORIS' kinds, read and applied by LyCORIS' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.modules import IA3Module, get_module, make_module
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.kernels.adapter_dropout import DropoutDraws
from tests.lora_files import write_as_forecast
from tests.tiny_models import SHALLOW_WIDER, trained, write_tiny_sdxl

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TARGETS = r"mid_block\.(attentions\.0\.proj_in|resnets\.0\.conv1)|down_blocks\.0\.downsamplers\.0\.conv"
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
    return write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)


def by_lycoris(tensors: dict[str, Tensor], key: str, base: nn.Module, x: Tensor) -> Tensor:
    """The output of a layer with the file's module, computed by LyCORIS."""
    output: Tensor = module_of(tensors, key, base)(x)
    return output


def module_of(tensors: dict[str, Tensor], key: str, base: nn.Module) -> Any:
    """LyCORIS' module with the file's tensors, over a layer."""
    kind, weights = get_module(tensors, key)
    if kind is IA3Module:  # its own loader fails on the second tensor, so it is loaded as a resumed training does
        with pytest.raises(TypeError):
            make_module(kind, weights, key, base)
        module = IA3Module(key, base, 1)
        module.load_state_dict({name: tensors[f"{key}.{name}"] for name in ("weight", "on_input")})
    else:
        module = make_module(kind, weights, key, base)
    module.org_forward = base.forward
    return module


def layers_and_modules(folder: Path, path: Path, lora: dict[str, Any]) -> tuple[Any, list[tuple[str, Any, Any]]]:
    """The adapter, and (name, layer, LyCORIS' module with the same tensors) of each layer."""
    family, _, adapter = trained(folder, lora={"targets": TARGETS, **lora}, output={"dtype": "fp32"})
    write_as_forecast("kohya", path, family, adapter, family.recipe, RunFacts(1, 1, 1))
    tensors, table = load_file(path), adapter.key_table("kohya")
    keys = {table.whole(key): key for key in table.parts if any(name.startswith(f"{key}.") for name in tensors)}
    return adapter, [
        (name, layer, module_of(tensors, keys[name], layer.get_base_layer()))
        for name, (_, _, layer) in adapter.modules.items()
    ]


def an_input(base: nn.Module) -> Tensor:
    return torch.randn(2, base.in_channels, 4, 4) if isinstance(base, nn.Conv2d) else torch.randn(2, base.in_features)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "key"), [
    ("LoKr, one whole", "rank_dropout"), ("LoHa", "rank_dropout"), ("LoHa", "module_dropout"),
])  # fmt: skip
def test_outputs_and_modules_are_dropped_as_by_lycoris(folder: Path, tmp_path: Path, kind: str, key: str) -> None:
    _, found = layers_and_modules(folder, tmp_path / "x.safetensors", {**KINDS[kind], key: 0.5})
    for _, layer, module in found:
        base = layer.get_base_layer()
        x, changed = an_input(base), set()
        setattr(module, key, 0.5)
        for seed in range(6):
            torch.manual_seed(seed)
            theirs = module.train()(x)
            torch.manual_seed(seed)
            for drop in layer.dropouts:  # the numbers that LyCORIS draws
                kept = DropoutDraws(layer.modules()).factors(drop, 1, x.device)
                kept.copy_(torch.rand(kept.shape) >= drop.p)
            ours = layer.train()(x)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            shown = (ours - base(x)).abs() > 1e-6
            changed.add(int(shown.flatten(2).any(2).any(0).sum() if x.ndim == 4 else shown.any(0).sum()))
        outputs = base.weight.shape[0]
        assert changed == {0, outputs} if key == "module_dropout" else 0 < min(changed) and max(changed) < outputs
        assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("drawn_between", [False, True])
def test_a_recomputed_layer_drops_the_same_again(folder: Path, drawn_between: bool) -> None:
    """``drawn_between``, the control: others are drawn before recomputation."""
    dropping = {"targets": r"mid_block\.attentions\.0\.proj_in", "rank_dropout": 0.5, "dropout": 0.5}
    _, _, adapter = trained(folder, lora={**KINDS["LoHa"], **dropping})
    ((_, _, layer),) = adapter.modules.values()
    model = LoadedModel({"unet": layer.train()}, torch.float32, torch.device("cpu"))
    x, leaves, found = torch.randn(2, 32), list(adapter.trained(layer, PEFT_NAME).values()), []
    draws = DropoutDraws(layer.modules())
    for run in (None, Recomputing(model)):
        draws.draw(3)
        y = layer(x) if run is None else run(layer, x)
        if drawn_between and run is not None:
            draws.draw(4)
        found.append(torch.autograd.grad(y.square().sum(), leaves))
    assert all(map(torch.equal, *found)) is not drawn_between


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("Lo")])
def test_updates_are_limited_as_by_lycoris(folder: Path, tmp_path: Path, kind: str) -> None:
    settings = {**KINDS[kind], "scale_weight_norms": 0.2}
    adapter, found = layers_and_modules(folder, tmp_path / "x.safetensors", settings)
    limit = adapter.norm_limit(adapter.family.recipe.lora)
    before = {name: entry.update() for name, entry in adapter.entries().items()}
    limit.apply(torch.tensor(1.0))
    assert all(torch.equal(entry.update(), before[name]) for name, entry in adapter.entries().items())
    limit.apply(torch.tensor(0.0))
    after = adapter.entries()
    for name, _, module in found:
        module.apply_max_norm(0.2)
        update = after[name].update()
        theirs = module.get_weight(update.shape) * (module.scalar if kind == "LoHa" else 1)
        torch.testing.assert_close(update, theirs.detach(), rtol=1e-4, atol=1e-5)
        assert update.norm() <= 0.2 * (1 + 1e-5)
    assert any(before[name].norm() > 0.25 for name in before), "else nothing is limited"


@pytest.mark.parametrize("kind", KINDS)
def test_lycoris_reads_the_file_with_equal_effect(folder: Path, tmp_path: Path, kind: str) -> None:
    family, _, adapter = trained(folder, lora={"targets": TARGETS, **KINDS[kind]}, output={"dtype": "fp32"})
    writers.write("kohya", tmp_path / "x.safetensors", family, adapter, family.recipe, RunFacts(1, 1, 1))
    tensors = load_file(tmp_path / "x.safetensors")
    table = adapter.key_table("kohya")
    keys = {table.whole(key): key for key in table.parts if any(name.startswith(f"{key}.") for name in tensors)}
    assert keys.keys() == adapter.modules.keys() and len(keys) == 3
    for name, (_, _, layer) in adapter.modules.items():
        base = layer.get_base_layer()
        x = an_input(base)
        torch.testing.assert_close(by_lycoris(tensors, keys[name], base, x), layer(x), rtol=1e-4, atol=1e-5)
        part = next(ending for ending in PARTS if f"{keys[name]}.{ending}" in tensors)
        wrong = tensors | {f"{keys[name]}.{part}": tensors[f"{keys[name]}.{part}"] * 1.1}
        assert not torch.allclose(by_lycoris(wrong, keys[name], base, x), layer(x), atol=1e-3), "the control"
