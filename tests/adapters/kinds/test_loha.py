"""LoHa: its computation, its start, its files in other programs, and the start from existing files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoHaConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.kinds.loha import LohaAdapter, LohaConv2d, LohaEntry, LohaLinear
from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.adapters.registry import kind_for
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.recipe.adapter_sections import LohaSection
from tests.lora_files import write_as_forecast
from tests.tiny_models import SHALLOW_WIDER, tiny_recipe, trained, unet_output, write_tiny_sdxl
from tests.wording import says

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

CPU = torch.device("cpu")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
TARGETS = r"mid_block\.(attentions\.0\.(proj_in|.*\.to_q)|resnets\.0\.conv1)|down_blocks\.0\.downsamplers\.0\.conv"
KEY = "lora_unet_middle_block_1_proj_in"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)
    shared.cache_clear()


def loha(**more: Any) -> dict[str, Any]:
    return {"type": "loha", "targets": TARGETS, "rank": 3, "alpha": 2.0, **more}


@cache
def shared(folder: Path) -> tuple[Any, Any, Any]:
    """(family, model, adapter), for tests that leave them as they are; files are written in float32."""
    return trained(folder, lora=loha(), output={"dtype": "fp32"})


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The adapter's file in each format."""
    family, _, adapter = shared(folder)
    paths = {
        form: tmp_path_factory.mktemp("files") / name for form, name in (("kohya", "x.safetensors"), ("peft", "p"))
    }
    for form, path in paths.items():
        write_as_forecast(form, path, family, adapter, family.recipe, FACTS)
    return paths


def by_hand(layer: Any) -> Tensor:
    """The change of the weight, entry by entry; shares nothing with the code."""
    a1, b1, a2, b2 = (getattr(layer, f"hada_{name}")[PEFT_NAME].detach() for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    rows = [torch.stack([sum(a1[o, r] * b1[r, i] for r in range(3)) * sum(a2[o, r] * b2[r, i] for r in range(3))
                         for i in range(b1.shape[1])]) for o in range(2)]  # fmt: skip
    return 2.0 / 3 * torch.stack(rows)


def test_layers_compute_the_formula_and_its_gradients(folder: Path) -> None:
    _, _, adapter = shared(folder)
    entries = adapter.entries()
    kinds = set()
    for name, (_, _, layer) in adapter.modules.items():
        base, leaves = layer.get_base_layer(), list(adapter.trained(layer, PEFT_NAME).values())
        change = entries[name].effect(base.weight.detach())
        torch.testing.assert_close(change.flatten(1)[:2], by_hand(layer))
        kinds.add(type(layer))
        x = torch.randn(2, base.in_channels, 6, 4) if isinstance(base, nn.Conv2d) else torch.randn(2, base.in_features)
        x.requires_grad_()
        way = torch.randn_like(base(x))
        ours = torch.autograd.grad((layer(x) * way).sum(), [x, *leaves])
        whole = base(x) + layer._get_delta_activations(PEFT_NAME, x)  # PEFT's own
        theirs = torch.autograd.grad((whole * way).sum(), [x, *leaves])
        torch.testing.assert_close(layer(x), whole)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        if isinstance(base, nn.Conv2d):
            expected = F.conv2d(x, base.weight + change, base.bias, base.stride, base.padding)
        else:
            expected = F.linear(x, base.weight + change, base.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert (expected - base(x)).norm() > 50 * (layer(x) - expected).norm(), "else the comparison says nothing"
    assert kinds == {LohaLinear, LohaConv2d}


def test_the_change_of_a_weight_is_not_kept_for_the_backward_pass(folder: Path) -> None:
    _, _, layer = shared(folder)[2].modules["unet.mid_block.attentions.0.proj_in"]
    base = layer.get_base_layer()
    x = torch.randn(2, base.in_features, requires_grad=True)

    def kept(run: Any) -> int:
        """Number of tensors of the weight's size that are kept."""
        seen: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: seen.append(tensor.numel()) or tensor, lambda t: t
        ):
            run(x)
        return seen.count(base.weight.numel())

    assert kept(layer) == kept(base) == 1
    assert kept(lambda x: base(x) + layer._get_delta_activations(PEFT_NAME, x)) == 2, "the control: PEFT's own"


def test_a_fresh_adapter_changes_nothing_and_draws_nothing_in_a_pass(folder: Path) -> None:
    recipe = tiny_recipe(folder, lora=loha())
    family = family_for(recipe)
    states = []
    for _ in range(2):
        model = family.load(torch.float32, CPU)
        plain, before = unet_output(model.components["unet"]), torch.get_rng_state()
        adapter = inject(family, model, recipe.lora, 3)
        model.components["unet"].train()
        torch.testing.assert_close(unet_output(model.components["unet"]), plain)
        assert torch.equal(before, torch.get_rng_state())
        states.append(adapter.state())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    w1_b = torch.cat([tensor.flatten() for name, tensor in states[0].items() if name.endswith("hada_w1_b")])
    assert w1_b.std() == pytest.approx(1, abs=0.05), "as in LyCORIS, whose learning rates are those of this start"


def test_sizes_are_known_without_layers(folder: Path) -> None:
    _, _, adapter = shared(folder)
    section = LohaSection(**loha())
    for name, (_, _, layer) in adapter.modules.items():
        held = sum(leaf.numel() for leaf_name, leaf in adapter.leaves.items() if leaf_name.startswith(f"{name}."))
        assert kind_for(section).weights_of(section, layer.get_base_layer().weight.shape) == held


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exports_are_loaded_back(folder: Path, tmp_path: Path, dtype: str) -> None:
    family, model, adapter = shared(folder)
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": dtype})})
    for to, path in (("kohya", tmp_path / "x.safetensors"), ("peft", tmp_path / "peft")):
        write_as_forecast(to, path, family, adapter, recipe, FACTS)
        found = writers.verify(to, path, family, model, adapter)
        assert found.relative_difference <= {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[dtype]
        assert any("diffusers" in words or "PEFT" in words for words in found.cannot_read)
    with pytest.raises(AdapterError, match="kohya, peft"):
        writers.write("diffusers", tmp_path / "d.safetensors", family, adapter, recipe, FACTS)


WRONG = {
    "one number": lambda t: t[f"{KEY}.hada_w1_a"][0, 0].add_(0.5),
    "another alpha": lambda t: t[f"{KEY}.alpha"].mul_(2),
    "a missing factor": lambda t: t.pop(f"{KEY}.hada_w2_b"),
    "a missing module": lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{KEY}.")],
    "exchanged factors": lambda t: t.update({f"{KEY}.hada_w1_a": t[f"{KEY}.hada_w2_a"].clone()}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_caught(folder: Path, files: dict[str, Path], tmp_path: Path, fault: str) -> None:
    family, model, adapter = shared(folder)
    tensors = load_file(files["kohya"])
    assert {name.removeprefix(f"{KEY}.") for name in tensors if name.startswith(f"{KEY}.")} == {
        "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"}  # fmt: skip
    WRONG[fault](tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ExportError):
        writers.verify("kohya", tmp_path / "x.safetensors", family, model, adapter)


@pytest.mark.parametrize("form", ["kohya", "peft"])
def test_a_file_is_attached_as_it_was_trained(folder: Path, files: dict[str, Path], form: str) -> None:
    family, model, adapter = shared(folder)
    bare = family.load(torch.float32, CPU)
    attached = attach_file(family, bare, files[form])
    assert isinstance(attached, LohaAdapter) and attached.modules.keys() == adapter.modules.keys()
    torch.testing.assert_close(unet_output(bare.components["unet"]), unet_output(model.components["unet"]))
    if form == "peft":
        theirs = family.load(torch.float32, CPU).components["unet"]
        loaded = PeftModel.from_pretrained(theirs, str(files[form] / "unet")).get_base_model()
        torch.testing.assert_close(unet_output(loaded.eval()), unet_output(model.components["unet"]))


def test_a_run_starts_from_a_file(folder: Path, files: dict[str, Path]) -> None:
    """Exactly with the settings of the file; with a higher rank and another scale with the same effect."""
    family, _, adapter = shared(folder)

    def start(**settings: Any) -> Any:
        recipe = tiny_recipe(folder, lora=loha(init_from=str(files["kohya"]), **settings))
        return inject(family_for(recipe), family.load(torch.float32, CPU), recipe.lora, 3)

    same, larger = start(), start(rank=5, alpha=4.0)
    for name, tensor in adapter.state().items():
        assert torch.equal(same.state()[name], tensor), name
    for name, entry in adapter.entries().items():
        torch.testing.assert_close(larger.entries()[name].update(), entry.update(), rtol=1e-4, atol=1e-5)
    with pytest.raises(AdapterError, match="rank 3") as caught:
        start(rank=2)
    assert says(caught.value.fix, "adapters/lora-rank-to-3")


def test_rows_of_a_weight_are_cut_exactly() -> None:
    w1, w2 = ((torch.randn(6, 2), torch.randn(2, 4)) for _ in range(2))
    entry = LohaEntry(w1, w2, 0.5, (6, 4))
    torch.testing.assert_close(entry.rows(2, 3).update(), entry.update()[2:5])
    assert entry.joined([(0, entry)], 6) is entry
    with pytest.raises(ValueError, match="LoHa of several"):
        entry.joined([(0, entry), (6, entry)], 12)


SOUND = {"hada_w1_a": (32, 2), "hada_w1_b": (2, 32), "hada_w2_a": (32, 2), "hada_w2_b": (2, 32)}


@pytest.mark.parametrize(("tensors", "code"), [
    ({"hada_w2_b": None}, "lora-incomplete"),
    ({"hada_w1_b": (3, 32)}, "lora-unreadable"),
    ({"hada_w2_b": (2, 31)}, "lora-unreadable"),
    ({"hada_w1_b": (2, 31), "hada_w2_b": (2, 31)}, "lora-of-another-model"),
    ({"hada_w1_a": (32, 1), "hada_w1_b": (1, 32)}, "lora-unreadable"),
    ({"hada_t1": (2, 2, 3, 3), "hada_t2": (2, 2, 3, 3)}, "lora-parts"),
    ({"dora_scale": (32, 1)}, "lora-parts"),
    ({"lokr_w1": (4, 4), "lokr_w2": (8, 8)}, "lora-parts"),
])  # fmt: skip
def test_what_is_no_loha(folder: Path, tmp_path: Path, tensors: dict[str, Any], code: str) -> None:
    family, path = family_for(tiny_recipe(folder)), tmp_path / "x.safetensors"
    components = {"unet": family.skeleton("unet")}
    save_file({f"{KEY}.{name}": torch.ones(shape) for name, shape in SOUND.items()}, path)
    assert isinstance(read_lora(family, components, path).popitem()[1], LohaEntry)
    save_file({f"{KEY}.{name}": torch.ones(shape) for name, shape in (SOUND | tensors).items() if shape}, path)
    with pytest.raises(AdapterError) as caught:
        read_lora(family, components, path)
    assert caught.value.code == code


def test_the_layers_are_peft_s_under_peft_s_names(folder: Path) -> None:
    _, model, _ = trained(folder, lora=loha())
    other = family_for(tiny_recipe(folder)).load(torch.float32, CPU).components["unet"]
    inject_adapter_in_model(LoHaConfig(r=3, target_modules=TARGETS), other, PEFT_NAME)
    ours, theirs = (dict(unet.named_parameters()) for unet in (model.components["unet"], other))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}
