"""OFT: its computation, its files in other programs, and the start from existing files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.kinds.oft import OftAdapter, OftEntry
from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.adapters.registry import kind_for
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.recipe.adapter_sections import OftSection
from tests.lora_files import write_as_forecast
from tests.tiny_models import SHALLOW_WIDER, tiny_recipe, trained, unet_output, write_tiny_sdxl
from tests.wording import saying, says

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

CPU = torch.device("cpu")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
TARGETS = r"mid_block\.(attentions\.0\.(proj_in|.*\.to_q)|resnets\.0\.conv1)|down_blocks\.0\.downsamplers\.0\.conv"
KEY = "lora_unet_middle_block_1_proj_in"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)
    shared.cache_clear()


def oft(**more: Any) -> dict[str, Any]:
    return {"type": "oft", "targets": TARGETS, "rank": 4, **more}


@cache
def shared(folder: Path, constraint: float = 0.0) -> tuple[Any, Any, Any]:
    """(family, model, adapter), for tests that leave them as they are; files are written in float32."""
    return trained(folder, lora=oft(constraint=constraint), output={"dtype": "fp32"})


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    family, _, adapter = shared(folder)
    write_as_forecast("kohya", path, family, adapter, family.recipe, FACTS)
    return path


def by_hand(weight: Tensor, blocks: Tensor, limit: float) -> Tensor:
    """The rotated weight, block by block."""
    skews = [block - block.T for block in blocks]
    norm = sum(float(skew.square().sum()) for skew in skews) ** 0.5
    eye, rows = torch.eye(blocks.shape[1]), []
    for number, skew in enumerate(skews):
        skew = skew * min(1.0, limit / norm) if limit else skew
        rotation = (eye + skew) @ torch.linalg.inv(eye - skew)
        torch.testing.assert_close(rotation @ rotation.T, eye, rtol=0, atol=1e-5)
        part = weight[number * len(eye) : (number + 1) * len(eye)]
        rows.append((rotation.T @ part.flatten(1)).reshape(part.shape))
    return torch.cat(rows)


@pytest.mark.parametrize("constraint", [0.0, 0.01])
def test_layers_compute_the_formula_and_its_gradients(folder: Path, constraint: float) -> None:
    """The bias is not rotated."""
    _, _, adapter = shared(folder, constraint)
    entries, seen = adapter.entries(), set()
    for name, (_, _, layer) in adapter.modules.items():
        base, blocks = layer.get_base_layer(), layer.oft_blocks[PEFT_NAME]
        wanted = by_hand(base.weight.detach(), blocks.detach(), constraint * len(base.weight))
        torch.testing.assert_close(base.weight + entries[name].effect(base.weight.detach()), wanted)
        conv = isinstance(base, nn.Conv2d)
        x = torch.randn(2, base.in_channels, 6, 4) if conv else torch.randn(2, 3, base.in_features)
        how = (base.stride, base.padding) if conv else ()
        run = F.conv2d if conv else F.linear
        expected = run(x, wanted, base.bias, *how)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert (expected - base(x)).norm() > 50 * (layer(x) - expected).norm(), "else the comparison says nothing"
        way = torch.randn_like(expected)
        ours = torch.autograd.grad((layer(x) * way).sum(), blocks)[0]
        step = torch.randn_like(blocks) * 1e-2
        with torch.no_grad():
            limit = constraint * len(base.weight)
            weights = [by_hand(base.weight, blocks + sign * step, limit) for sign in (1, -1)]
            moved = [(run(x, weight, base.bias, *how) * way).sum() for weight in weights]
        assert float((ours * step).sum()) == pytest.approx(float(moved[0] - moved[1]) / 2, rel=2e-2, abs=2e-3)
        seen.add(type(base))
    assert len(seen) == 2


def test_a_fresh_adapter_changes_nothing_and_can_be_trained(folder: Path) -> None:
    recipe = tiny_recipe(folder, lora=oft(constraint=0.1))
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    plain = unet_output(model.components["unet"])
    adapter = inject(family, model, recipe.lora, 3)
    torch.testing.assert_close(unet_output(model.components["unet"]), plain)
    layer = adapter.modules["unet.mid_block.attentions.0.proj_in"][2]
    gradient = torch.autograd.grad(layer(torch.randn(2, 32)).square().sum(), layer.oft_blocks[PEFT_NAME])[0]
    assert torch.isfinite(gradient).all() and gradient.any()


def test_dropout_is_in_training_alone(folder: Path) -> None:
    _, _, adapter = trained(folder, lora=oft(dropout=0.5))
    _, _, layer = adapter.modules["unet.mid_block.attentions.0.proj_in"]
    x = torch.ones(1, 64, 32)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_sizes_are_known_without_layers(folder: Path) -> None:
    _, _, adapter = shared(folder)
    section = OftSection(**oft())
    for name, (_, _, layer) in adapter.modules.items():
        held = adapter.leaves[f"{name}.oft_blocks"].numel()
        assert kind_for(section).weights_of(section, layer.get_base_layer().weight.shape) == held


@pytest.mark.parametrize(("dtype", "constraint"), [("fp32", 0.0), ("fp16", 0.01), ("bf16", 0.0)])
def test_exports_are_loaded_back(folder: Path, tmp_path: Path, dtype: str, constraint: float) -> None:
    family, model, adapter = shared(folder, constraint)
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": dtype})})
    writers.write("kohya", tmp_path / "x.safetensors", family, adapter, recipe, FACTS)
    found = writers.verify("kohya", tmp_path / "x.safetensors", family, model, adapter)
    assert found.relative_difference <= {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[dtype]
    assert any("PEFT" in words for words in found.cannot_read) and "%" not in str(found.cannot_read)
    with pytest.raises(AdapterError, match="kohya"):
        writers.write("peft", tmp_path / "peft", family, adapter, recipe, FACTS)


WRONG = {
    "one number": lambda t: t[f"{KEY}.oft_blocks"][0, 0, 1].add_(0.1),
    "a constraint": lambda t: t[f"{KEY}.alpha"].add_(0.1),
    "turned round": lambda t: t[f"{KEY}.oft_blocks"].neg_(),
    "a missing module": lambda t: t.pop(f"{KEY}.oft_blocks"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_caught(folder: Path, file: Path, tmp_path: Path, fault: str) -> None:
    family, model, adapter = shared(folder)
    tensors = load_file(file)
    WRONG[fault](tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ExportError):
        writers.verify("kohya", tmp_path / "x.safetensors", family, model, adapter)


def test_a_file_is_attached_as_it_was_trained(folder: Path, file: Path) -> None:
    family, model, adapter = shared(folder)
    bare = family.load(torch.float32, CPU)
    attached = attach_file(family, bare, file)
    assert isinstance(attached, OftAdapter) and attached.modules.keys() == adapter.modules.keys()
    torch.testing.assert_close(unet_output(bare.components["unet"]), unet_output(model.components["unet"]))


def test_a_run_starts_from_a_file(folder: Path, file: Path) -> None:
    _, _, adapter = shared(folder)

    def start(**settings: Any) -> Any:
        recipe = tiny_recipe(folder, lora=oft(init_from=str(file), **settings))
        return inject(family_for(recipe), family_for(recipe).load(torch.float32, CPU), recipe.lora, 3)

    assert all(torch.equal(tensor, adapter.state()[name]) for name, tensor in start().state().items())
    with pytest.raises(AdapterError, match="4 rows") as caught:
        start(rank=2)
    assert says(caught.value.fix, "adapters/lora-rank-to-4")


def test_an_alpha_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, check=saying("adapters/has-no-scale")):
        tiny_recipe(folder, lora=oft(alpha=1.0))


def test_rows_of_a_weight_are_cut_between_blocks() -> None:
    entry, weight = OftEntry(torch.randn(3, 2, 2), 1.0, (6, 4)), torch.randn(6, 4)
    torch.testing.assert_close(entry.rows(2, 4).effect(weight[2:]), entry.effect(weight)[2:])
    with pytest.raises(ValueError, check=saying("adapters/between-its-blocks")):
        entry.rows(1, 2)


@pytest.mark.parametrize(("tensors", "code"), [
    ({"oft_blocks": (2, 2, 4, 4)}, "lora-unreadable"),
    ({"oft_blocks": (8, 4, 3)}, "lora-unreadable"),
    ({"oft_blocks": (7, 4, 4)}, "lora-of-another-model"),
    ({"oft_blocks": (8, 4, 4), "rescale": (32, 1)}, "lora-parts"),
    ({"oft_blocks": (8, 4, 4), "alpha": ()}, "lora-constraint"),
])  # fmt: skip
def test_what_is_no_oft(folder: Path, tmp_path: Path, tensors: dict[str, Any], code: str) -> None:
    """A constraint is the trouble only if it limits."""
    family, path = family_for(tiny_recipe(folder)), tmp_path / "x.safetensors"
    components = {"unet": family.skeleton("unet")}
    blocks = torch.randn(8, 4, 4)
    save_file({f"{KEY}.oft_blocks": blocks, f"{KEY}.alpha": torch.tensor(100.0)}, path)
    assert isinstance(read_lora(family, components, path).popitem()[1], OftEntry)
    save_file({f"{KEY}.{name}": torch.rand(shape) for name, shape in tensors.items()}, path)
    with pytest.raises(AdapterError) as caught:
        read_lora(family, components, path)
    assert caught.value.code == code
