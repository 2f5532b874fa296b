"""LoKr: its computation, its start, its files in other programs, and the start from existing files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoKrConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.kinds.lokr import LokrAdapter, LokrConv2d, LokrEntry, LokrLinear
from lora_rocm.adapters.lora_files.lora_reader import components_of, read_lora
from lora_rocm.adapters.registry import kind_for
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.recipe.adapter_sections import LokrSection
from tests.lora_files import write_as_forecast
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW_WIDER, tiny_recipe, trained, unet_output, write_tiny_sdxl
from tests.wording import Worded, saying, says, worded

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

CPU = torch.device("cpu")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
TARGETS = MIDDLE_TARGETS + r"|mid_block\.resnets\.0\.conv1|down_blocks\.0\.downsamplers\.0\.conv"
FORMS: dict[str, dict[str, Any]] = {
    "both whole": {"rank": 64, "alpha": 2.0},
    "second a product": {"rank": 2, "alpha": 1.0},
    "both products": {"rank": 1, "alpha": 0.5, "decompose_both": True, "factor": 4},
    "factor 8": {"rank": 2, "alpha": 1.0, "factor": 8},
}
SLOW_FORMS = ("second a product", "factor 8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)
    shared.cache_clear()


@cache
def shared(folder: Path, form: str) -> tuple[Any, Any, Any]:
    """(family, model, adapter) of a variant, for tests that do not change them; files are written in float32."""
    return trained(folder, lora=lokr(**FORMS[form]), output={"dtype": "fp32"})


def lokr(**more: Any) -> dict[str, Any]:
    return {"type": "lokr", "targets": TARGETS, **more}


def injected(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any, Any]:
    recipe = tiny_recipe(folder, lora=lokr(**more))
    family = family_for(recipe)
    model = family.load(dtype, CPU)
    return family, model, inject(family, model, recipe.lora, 3)


def by_hand(layer: Any) -> Tensor:
    """The change of the weight, entry by entry of LyCORIS' formula; shares nothing with the code."""
    parts = {
        name: getattr(layer, name)[PEFT_NAME].detach() for name in layer.adapter_layer_names if getattr(layer, name)
    }
    w1 = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    w2 = parts["lokr_w2"].flatten(1) if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    rank = next((t.shape[0] for name, t in parts.items() if name.endswith("_b")), None)
    change = torch.cat([torch.cat([number * w2 for number in row], dim=1) for row in w1])
    scale = 1.0 if rank is None else layer.alpha[PEFT_NAME] / rank
    return scale * change.reshape(layer.get_base_layer().weight.shape)


@pytest.mark.parametrize("form", FORMS)
def test_layers_compute_the_formula(folder: Path, form: str) -> None:
    _, _, adapter = shared(folder, form)
    entries = adapter.entries()
    kinds = set()
    for name, (_, _, layer) in adapter.modules.items():
        base = layer.get_base_layer()
        change = by_hand(layer)
        torch.testing.assert_close(entries[name].effect(base.weight.detach()), change)
        kinds.add(type(layer))
        if isinstance(base, nn.Conv2d):
            x = torch.randn(2, base.in_channels, 6, 4)
            expected = F.conv2d(x, base.weight + change, base.bias, base.stride, base.padding)
        else:
            x = torch.randn(2, 5, base.in_features)
            expected = F.linear(x, base.weight + change, base.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert (expected - base(x)).norm() > 50 * (layer(x) - expected).norm(), "else the comparison says nothing"
    assert kinds == {LokrLinear, LokrConv2d}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_whole_change(folder: Path, form: str) -> None:
    _, _, adapter = shared(folder, form)
    for _, _, layer in adapter.modules.values():
        base, leaves = layer.get_base_layer(), list(adapter.trained(layer, PEFT_NAME).values())
        x = torch.randn(2, base.in_channels, 6, 6) if isinstance(base, nn.Conv2d) else torch.randn(3, base.in_features)
        way = torch.randn_like(base(x))
        ours = torch.autograd.grad((layer(x) * way).sum(), leaves)
        delta = layer._get_delta_activations(PEFT_NAME, x)  # PEFT's own, by the whole change
        theirs = torch.autograd.grad((delta * way).sum(), leaves)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed(folder: Path, dtype: torch.dtype) -> None:
    family, model, adapter = injected(folder, dtype, rank=2, factor=4)
    plain = unet_output(family.load(dtype, CPU).components["unet"].float())
    torch.testing.assert_close(unet_output(model.components["unet"].float()), plain)
    assert {leaf.dtype for leaf in adapter.leaves.values()} == {torch.float32}
    before = torch.get_rng_state()
    again = injected(folder, dtype, rank=2, factor=4)[2].state()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(tensor, again[name]) for name, tensor in adapter.state().items())
    assert any(tensor.any() for tensor in again.values())


def test_no_random_number_is_drawn_in_a_pass(folder: Path) -> None:
    """PEFT's layer draws one for each call in training, and leaves itself out where that is zero."""
    _, model, _ = injected(folder, rank=2)
    model.components["unet"].train()
    before = torch.get_rng_state()
    unet_output(model.components["unet"])
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_is_on_the_input_and_in_training_alone(folder: Path) -> None:
    _, _, adapter = trained(folder, lora=lokr(rank=2, dropout=0.5))
    _, _, layer = adapter.modules["unet.mid_block.attentions.0.proj_in"]
    x = torch.ones(1, 64, layer.get_base_layer().weight.shape[1])
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_switched_off_it_is_the_base(folder: Path) -> None:
    family, model, adapter = trained(folder, lora=lokr(rank=2))
    base = unet_output(family.load(torch.float32, CPU).components["unet"])
    with adapter.disabled():
        assert torch.equal(unet_output(model.components["unet"]), base)
    assert not torch.equal(unet_output(model.components["unet"]), base)
    assert all(leaf.requires_grad for leaf in adapter.leaves.values())


@pytest.mark.parametrize("form", FORMS)
def test_sizes_are_known_without_layers(folder: Path, form: str) -> None:
    _, _, adapter = injected(folder, **FORMS[form])
    section = LokrSection(**lokr(**FORMS[form]))
    for name, (_, _, layer) in adapter.modules.items():
        shape = layer.get_base_layer().weight.shape
        held = sum(leaf.numel() for leaf_name, leaf in adapter.leaves.items() if leaf_name.startswith(f"{name}."))
        assert kind_for(section).weights_of(section, shape) == held


@pytest.mark.parametrize(("form", "dtype"), [*((form, "fp32") for form in FORMS), ("factor 8", "fp16"),
                                            ("both products", "bf16")])  # fmt: skip
def test_exports_are_loaded_back(folder: Path, tmp_path: Path, form: str, dtype: str) -> None:
    family, model, adapter = shared(folder, form)
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": dtype})})
    for to in ("kohya", "peft"):
        path = tmp_path / ("peft" if to == "peft" else "lokr.safetensors")
        write_as_forecast(to, path, family, adapter, recipe, FACTS)
        found = writers.verify(to, path, family, model, adapter)
        assert found.relative_difference <= {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}[dtype]
        assert any("diffusers" in words or "PEFT" in words for words in found.cannot_read)


def test_text_encoders_are_written_and_read(folder: Path, tmp_path: Path) -> None:
    settings = lokr(rank=2, factor=4, train_text_encoder=True, targets=r"mid_block\.attentions\.0\.proj_in")
    family, model, adapter = trained(folder, lora=settings)
    assert adapter.components == ["text_encoder", "text_encoder_2", "unet"]
    for to, path in (("kohya", tmp_path / "x.safetensors"), ("peft", tmp_path / "peft")):
        write_as_forecast(to, path, family, adapter, family.recipe, FACTS)
        writers.verify(to, path, family, model, adapter)
        assert components_of(family, path) == {"text_encoder", "text_encoder_2", "unet"}
        assert read_lora(family, model.components, path).keys() == adapter.modules.keys()


def test_a_kohya_file_has_lycoris_names(folder: Path, tmp_path: Path) -> None:
    family, _, adapter = trained(folder, lora=lokr(rank=1, alpha=0.5, factor=4))
    writers.write("kohya", tmp_path / "x.safetensors", family, adapter, family.recipe, FACTS)
    tensors = load_file(tmp_path / "x.safetensors")
    key = "lora_unet_middle_block_1_proj_in"
    names = {name.removeprefix(f"{key}.") for name in tensors if name.startswith(f"{key}.")}
    assert names == {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"} and tensors[f"{key}.alpha"] == 0.5


def test_peft_draws_the_same_by_its_own_layers(folder: Path, tmp_path: Path) -> None:
    family, model, adapter = trained(folder, lora=lokr(rank=2, alpha=1.0), output={"dtype": "fp32"})
    writers.write("peft", tmp_path / "peft", family, adapter, family.recipe, FACTS)
    bare = family.load(torch.float32, CPU).components["unet"]
    loaded = PeftModel.from_pretrained(bare, str(tmp_path / "peft" / "unet")).get_base_model()
    torch.testing.assert_close(unet_output(loaded.eval()), unet_output(model.components["unet"]), rtol=1e-4, atol=1e-4)


def test_the_diffusers_form_is_refused(folder: Path, tmp_path: Path) -> None:
    family, _, adapter = trained(folder, lora=lokr(rank=2))
    with pytest.raises(AdapterError, match="kohya, peft"):
        writers.write("diffusers", tmp_path / "x.safetensors", family, adapter, family.recipe, FACTS)


WRONG = {
    "one number": lambda t, key: t[f"{key}.lokr_w1"][0, 0].add_(0.5),
    "another alpha": lambda t, key: t[f"{key}.alpha"].mul_(2),
    "a missing factor": lambda t, key: t.pop(f"{key}.lokr_w2_b"),
    "a missing module": lambda t, key: [t.pop(name) for name in list(t) if name.startswith(f"{key}.")],
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_caught(folder: Path, tmp_path: Path, fault: str) -> None:
    family, model, adapter = trained(folder, lora=lokr(rank=1, alpha=0.5, factor=4))
    path = tmp_path / "x.safetensors"
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    writers.verify("kohya", path, family, model, adapter)  # the control
    tensors = load_file(path)
    WRONG[fault](tensors, "lora_unet_middle_block_1_proj_in")
    save_file(tensors, path)
    with pytest.raises(ExportError):
        writers.verify("kohya", path, family, model, adapter)


@pytest.mark.parametrize(("form", "to"), [
    pytest.param(form, to, marks=() if (form, to) in {("both whole", "peft"), ("both products", "kohya")}
                 else pytest.mark.slow)
    for form in FORMS for to in ("kohya", "peft")
])  # fmt: skip
def test_a_file_is_attached_as_it_was_trained(folder: Path, tmp_path: Path, form: str, to: str) -> None:
    family, model, adapter = shared(folder, form)
    path = tmp_path / ("peft" if to == "peft" else "x.safetensors")
    writers.write(to, path, family, adapter, family.recipe, FACTS)
    bare = family.load(torch.float32, CPU)
    attached = attach_file(family, bare, path)
    assert isinstance(attached, LokrAdapter) and attached.modules.keys() == adapter.modules.keys()
    torch.testing.assert_close(unet_output(bare.components["unet"]), unet_output(model.components["unet"]))
    half = family.load(torch.float32, CPU)
    attach_file(family, half, path, strength=0.5)
    assert not torch.allclose(unet_output(half.components["unet"]), unet_output(bare.components["unet"]))


def start(folder: Path, path: Path, **settings: Any) -> tuple[Any, list[str]]:
    recipe = tiny_recipe(folder, lora=lokr(init_from=str(path), **settings))
    family, said = family_for(recipe), []
    model = family.load(torch.float32, CPU)
    return inject(family, model, recipe.lora, 3, said.append), said


@pytest.mark.parametrize(
    "form", ["both whole", "both products", *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW_FORMS)]
)
def test_a_run_starts_from_a_file(folder: Path, tmp_path: Path, form: str) -> None:
    """Exactly with the settings of the file; with a higher rank and another scale with the same effect."""
    family, _, adapter = shared(folder, form)
    path = tmp_path / "x.safetensors"
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    same, _ = start(folder, path, **FORMS[form])
    for name, tensor in adapter.state().items():
        assert torch.equal(same.state()[name], tensor), name
    more = FORMS[form] | {"rank": FORMS[form]["rank"] + 1, "alpha": 3.0}
    larger, _ = start(folder, path, **more)
    for name, entry in adapter.entries().items():
        torch.testing.assert_close(larger.entries()[name].update(), entry.update(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("settings", "words"), [
    ({"rank": 4, "factor": 4}, worded("adapters/lora-factor-to-8")),
    ({"rank": 1, "factor": 8}, worded("adapters/lora-rank-to-2")),
    ({"rank": 2, "factor": 8, "decompose_both": True}, worded("adapters/lora-decompose-both-to-false")),
])  # fmt: skip
def test_what_a_file_needs_is_said(folder: Path, tmp_path: Path, settings: dict[str, Any], words: Worded) -> None:
    family, _, adapter = shared(folder, "factor 8")
    path = tmp_path / "x.safetensors"
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    with pytest.raises(AdapterError) as caught:
        start(folder, path, **settings)
    assert caught.value.code == "init-from-unfit" and says(caught.value.fix, words)


def test_a_lora_does_not_start_a_lokr_nor_the_other_way_round(folder: Path, tmp_path: Path) -> None:
    for made, wanted in (("lora", "lokr"), ("lokr", "lora")):
        family, _, adapter = trained(folder, lora={"type": made, "rank": 2, "targets": MIDDLE_TARGETS})
        path = tmp_path / f"{made}.safetensors"
        writers.write("kohya", path, family, adapter, family.recipe, FACTS)
        recipe = tiny_recipe(folder, lora={"type": wanted, "targets": MIDDLE_TARGETS, "init_from": str(path)})
        with pytest.raises(AdapterError, check=saying("adapters/lora-type-to-made", made=made)) as caught:
            inject(family_for(recipe), family.load(torch.float32, CPU), recipe.lora, 3)
        assert caught.value.code == "init-from-kind"


KEY = "lora_unet_middle_block_1_proj_in"


@pytest.mark.parametrize(("tensors", "code"), [
    ({"lokr_w1": (4, 4)}, "lora-incomplete"),
    ({"lokr_w1": (4, 4), "lokr_w2_a": (8, 2)}, "lora-incomplete"),
    ({"lokr_w1": (4, 4), "lokr_w1_a": (4, 1), "lokr_w1_b": (1, 4), "lokr_w2": (8, 8)}, "lora-unreadable"),
    ({"lokr_w1": (4, 4), "lokr_w2": (8, 7)}, "lora-of-another-model"),
    ({"lokr_w1": (4, 4), "lokr_w2_a": (8, 2), "lokr_w2_b": (3, 8)}, "lora-unreadable"),
    ({"lokr_w1": (4, 4), "lokr_w2": (8, 8), "dora_scale": (32, 1)}, "lora-parts"),
    ({"lokr_w1": (4, 4), "lokr_w2_a": (2, 8), "lokr_w2_b": (2, 8), "lokr_t2": (2, 2, 1, 1)}, "lora-parts"),
    ({"lokr_w1": (4, 4), "lokr_w2": (8, 8), "lora_up.weight": (32, 1), "lora_down.weight": (1, 32)}, "lora-parts"),
])  # fmt: skip
def test_what_is_no_lokr(folder: Path, tmp_path: Path, tensors: dict[str, Any], code: str) -> None:
    family = family_for(tiny_recipe(folder))
    components = {"unet": family.skeleton("unet")}
    sound = {f"{KEY}.lokr_w1": torch.ones(4, 4), f"{KEY}.lokr_w2": torch.ones(8, 8)}
    save_file(sound, tmp_path / "x.safetensors")
    assert isinstance(read_lora(family, components, tmp_path / "x.safetensors").popitem()[1], LokrEntry)
    save_file({f"{KEY}.{name}": torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError) as caught:
        read_lora(family, components, tmp_path / "x.safetensors")
    assert caught.value.code == code


def test_a_peft_folder_of_peft_s_own_making_is_read_with_its_scale(folder: Path, tmp_path: Path) -> None:
    """PEFT divides by the config's rank, also where no factor has it."""
    family = family_for(tiny_recipe(folder))
    unet = family.load(torch.float32, CPU).components["unet"]
    config = LoKrConfig(r=64, alpha=16, target_modules=["proj_in"], init_weights=False)
    peft_model = PeftModel(unet, config)
    peft_model.save_pretrained(str(tmp_path))
    read = read_lora(family, {"unet": family.skeleton("unet")}, tmp_path)
    layers = {f"unet.{n}": m for n, m in peft_model.get_base_model().named_modules() if hasattr(m, "lokr_w1")}
    assert read.keys() == layers.keys()
    for name, entry in read.items():
        torch.testing.assert_close(entry.update(), layers[name].get_delta_weight("default").detach())
        assert entry.scale == 0.25


def test_the_layers_are_peft_s_under_peft_s_names(folder: Path) -> None:
    """``layers_mapping`` and PEFT's constructor are not documented, so their results are checked."""
    _, model, _ = injected(folder, rank=2, factor=4)
    other = family_for(tiny_recipe(folder)).load(torch.float32, CPU).components["unet"]
    inject_adapter_in_model(LoKrConfig(r=2, decompose_factor=4, target_modules=TARGETS), other, PEFT_NAME)
    ours, theirs = (dict(unet.named_parameters()) for unet in (model.components["unet"], other))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}
