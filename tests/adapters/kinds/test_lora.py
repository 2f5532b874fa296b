"""The adapter: injected layers, their start, and the files they can start from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.adapters import targets as targets_module
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.kinds.lora import trained_scale
from lora_rocm.errors import AdapterError
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.kernels.adapter_dropout import DropoutDraws
from tests.adapters.lycoris import locon
from tests.lora_files import write_as_forecast
from tests.tiny_models import MIDDLE_TARGETS, SHALLOW_RISING, tiny_recipe, trained, unet_output, write_tiny_sdxl
from tests.wording import says

CPU = torch.device("cpu")
FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
FEW = {"rank": 4, "alpha": 2.0, "targets": MIDDLE_TARGETS}
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
MODULES = (  # square, not square, both as convolutions
    f"{BLOCK}.attn1.to_q",
    f"{BLOCK}.attn2.to_k",
    f"{BLOCK}.ff.net.0.proj",
    "mid_block.resnets.0.conv1",
    "down_blocks.1.resnets.0.conv1",
    "down_blocks.1.resnets.0.conv_shortcut",
    "down_blocks.0.downsamplers.0.conv",
)
EACH_KIND = (  # a layer of each kind and shape
    r"mid_block\..*(\.to_q|\.to_k|net\.0\.proj|resnets\.0\.conv1)"
    r"|down_blocks\.(0\.downsamplers\.0\.conv|1\.resnets\.0\.conv_shortcut)"
)
FORMS = ("kohya", "diffusers", "peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_RISING)
    adapted.cache_clear()


@cache
def adapted(folder: Path, lora: str) -> tuple[Any, Adapter, Tensor]:
    """(family, adapter, what its model makes), shared between tests that only export it; ``lora`` as JSON."""
    family, model, adapter = trained(folder, lora=FEW | json.loads(lora))
    return family, adapter, unet_output(model.components["unet"])


def injected(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 3, **lora: Any) -> tuple[Any, Any, Adapter]:
    recipe = tiny_recipe(folder, lora={"rank": 4, "targets": MIDDLE_TARGETS, **lora})
    family = family_for(recipe)
    model = family.load(dtype, CPU)
    return family, model, inject(family, model, recipe.lora, seed)


def exported(form: str, path: Path, family: Any, adapter: Adapter, dtype: str = "fp32") -> Path:
    recipe = family.recipe.model_copy(update={"output": family.recipe.output.model_copy(update={"dtype": dtype})})
    write_as_forecast(form, path, family, adapter, recipe, FACTS)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_fresh_adapter_changes_nothing(folder: Path, dtype: torch.dtype, use_dora: bool) -> None:
    family, model, adapter = injected(folder, dtype, targets=EACH_KIND, use_dora=use_dora)
    base = family.load(dtype, CPU).components["unet"]
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        adapted, plain = unet_output(model.components["unet"]), unet_output(base)
    assert torch.allclose(adapted.float(), plain.float(), atol=1e-6 if dtype is torch.float32 else 0.03)
    assert {p.dtype for p in adapter.parameters.values()} == {torch.float32}


def test_dora_starts_from_exact_norms_also_on_a_bf16_base(folder: Path) -> None:
    _, _, adapter = injected(folder, torch.bfloat16, use_dora=True)
    for name, (_, _, layer) in adapter.modules.items():
        norms = layer.get_base_layer().weight.float().flatten(1).norm(dim=1)
        torch.testing.assert_close(adapter.parameters[f"{name}.magnitude"].flatten(), norms, rtol=1e-6, atol=0)


def test_the_start_depends_on_the_seed_alone(folder: Path) -> None:
    def start(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        torch.manual_seed(torch.seed())
        return injected(folder, dtype, seed)[2].state()

    first, again, half, other = start(3), start(3), start(3, torch.bfloat16), start(4)
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], half[name]) for name in first)
    downs = [name for name in first if name.endswith("lora_A")]
    assert not any(torch.equal(first[name], other[name]) for name in downs)
    assert all(not first[name].any() for name in first if name.endswith("lora_B"))


def test_injecting_leaves_the_global_generator_alone(folder: Path) -> None:
    before = torch.get_rng_state()
    injected(folder)
    assert torch.equal(before, torch.get_rng_state())


def test_only_the_adapter_is_trained(folder: Path) -> None:
    _, model, adapter = injected(folder, targets="attention-mlp-conv", train_text_encoder=True)
    ours = {id(parameter) for parameter in adapter.leaves.values()}
    for component in model.components.values():
        assert all(p.requires_grad is (id(p) in ours) for p in component.parameters())


@pytest.mark.parametrize(("targets", "modules"), [
    ("attention", 4 * 8),
    ("attention-mlp", 4 * 10 + 4 * 2),
    ("attention-mlp-conv", 4 * 10 + 4 * 2 + 8 * 3 + 5 + 2),
    (r".*\.attn2\.to_k", 4),
    ((r".*\.attn2\.to_k", r"conv_in"), 5),
])  # fmt: skip
def test_targets(folder: Path, targets: Any, modules: int) -> None:
    """4 blocks of one transformer layer; 8 resnets, 5 of them with a change of width; 2 samplers."""
    _, _, adapter = injected(folder, targets=targets)
    assert len(adapter.modules) == modules
    assert adapter.components == ["unet"]


def test_text_encoders_are_adapted_when_asked(folder: Path) -> None:
    _, _, adapter = injected(folder, targets=r".*\.attn2\.to_k", train_text_encoder=True)
    assert adapter.components == ["text_encoder", "text_encoder_2", "unet"]
    assert sum(name.startswith("text_encoder.encoder.layers.") for name in adapter.modules) == 12
    assert sum(name.startswith("text_encoder_2.encoder.layers.") for name in adapter.modules) == 12


@pytest.mark.parametrize(("targets", "code"), [
    ("nothing", "targets-match-nothing"),
    ("attention-mpl", "targets-match-nothing"),
    ("(", "targets-invalid"),
    ("a{99999999999}", "targets-invalid"),
    ("(" * 5000 + ")" * 5000, "targets-invalid"),
    (r"down_blocks\.0", "targets-match-nothing"),
])  # fmt: skip
def test_targets_that_cannot_be(folder: Path, targets: str, code: str) -> None:
    with pytest.raises(AdapterError) as caught:
        injected(folder, targets=targets)
    assert caught.value.code == code and "attention-mlp" in caught.value.fix
    if code == "targets-match-nothing":
        assert "transformer_blocks" in caught.value.fix


@pytest.mark.timeout(60)
@pytest.mark.parametrize("targets", [r"(\w|\w\w|\.)+[A-Z]", r"(.|..)+[A-Z]"])
def test_targets_that_would_be_tried_without_end(folder: Path, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "MATCHING_S", 0.1)
    with pytest.raises(AdapterError) as caught:
        injected(folder, targets=targets)
    assert caught.value.code == "targets-endless" and targets in caught.value.where


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of Python, at "[[": a word in worker.log
@settings(max_examples=15)
@given(st.text(alphabet="abc.*+?()[]\\d{}|_12", min_size=1, max_size=12))
def test_any_targets_give_an_adapter_or_a_sentence(folder: Path, targets: str) -> None:
    try:
        assert injected(folder, targets=targets)[2].modules
    except AdapterError as error:
        assert error.code.startswith("targets-")


def test_groups_have_their_own_learning_rates(folder: Path) -> None:
    optim = {"learning_rate": 1e-3, "text_encoder_learning_rate": 1e-5}
    family, _, adapter = trained(folder, lora={**FEW, "train_text_encoder": True}, optim=optim)
    groups = {group["component"]: group for group in adapter.groups(family.recipe.optim, family.recipe.lora)}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "unet": 1e-3,
        "text_encoder": 1e-5,
        "text_encoder_2": 1e-5,
    }
    named = [name for group in groups.values() for name in group["names"]]
    assert sorted(named) == sorted(adapter.parameters)


@pytest.mark.parametrize("key", ["dropout", "rank_dropout", "module_dropout"])
def test_what_the_recipe_drops_is_dropped_in_training_alone(folder: Path, key: str) -> None:
    """Numbers of the input, as torch drops them; ranks of a sample, the others doubled; or the whole module."""
    _, _, adapter = trained(folder, lora={**FEW, key: 0.5})
    _, _, layer = adapter.modules["unet.mid_block.attentions.0.proj_in"]
    down_RI, up_OR = (layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach() * 0.5)
    x_BSI = torch.randn(64, 3, down_RI.shape[1])

    def added() -> Tensor:
        torch.manual_seed(0)
        return (layer(x_BSI) - layer.base_layer(x_BSI)).detach()

    whole_BSR = x_BSI @ down_RI.T
    torch.testing.assert_close(layer.eval() and added(), whole_BSR @ up_OR.T, rtol=1e-4, atol=1e-5)
    layer.train()
    if key == "dropout":
        torch.manual_seed(0)
        expected = torch.nn.functional.dropout(x_BSI, 0.5) @ down_RI.T @ up_OR.T
        torch.testing.assert_close(added(), expected, rtol=1e-4, atol=1e-5)
    elif key == "rank_dropout":
        found_BSR = added() @ torch.linalg.pinv(up_OR).T
        kept_B1R = (found_BSR.abs().sum(1) > whole_BSR.abs().sum(1))[:, None]
        torch.testing.assert_close(found_BSR, 2 * whole_BSR * kept_B1R, rtol=1e-3, atol=1e-3)
        assert 0.3 < float(kept_B1R.float().mean()) < 0.7
    else:
        draws, passes = DropoutDraws(layer.modules()), list[Tensor]()
        for seed in range(20):
            draws.draw(seed)
            passes.append(added())
        dropped = [not each.any() for each in passes]
        assert 0 < sum(dropped) < 20
        for each in (each for each, gone in zip(passes, dropped, strict=True) if not gone):
            torch.testing.assert_close(each, whole_BSR @ up_OR.T, rtol=1e-4, atol=1e-5)


def test_updates_keep_to_the_norm_of_the_recipe(folder: Path) -> None:
    """By the formula of kohya's scripts, for each module with its scale."""
    most = 0.31
    family, _, adapter = trained(folder, lora={**FEW, "scale_weight_norms": most})
    before = adapter.entries()
    limit = adapter.norm_limit(family.recipe.lora)
    assert limit is not None
    limit.apply(torch.tensor(0.0))
    factors = set()
    for name, entry in adapter.entries().items():
        factor = float((most / before[name].update().norm()).clamp(max=1.0).sqrt())
        torch.testing.assert_close(entry.down, before[name].down * factor)
        torch.testing.assert_close(entry.up, before[name].up * factor)
        factors.add(factor)
    assert max(factors) == 1.0 > min(factors)


def test_state_goes_round(folder: Path) -> None:
    _, model, adapter = trained(folder, lora={**FEW, "use_dora": True})
    state, output = adapter.state(), unet_output(model.components["unet"])
    _, other_model, other = injected(folder, use_dora=True, alpha=4.0)
    other.load(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state().items())
    with torch.no_grad():
        next(iter(adapter.parameters.values())).add_(1.0)
    assert not torch.equal(adapter.state()[next(iter(state))], state[next(iter(state))])  # a copy, no view
    assert not torch.equal(output, unet_output(other_model.components["unet"]))  # alpha is not in the state


@pytest.mark.parametrize("lora", [{"rank": 8}, {"rank": 4, "targets": "attention"}, {"rank": 4, "use_dora": True}])
def test_a_state_of_another_shape_is_refused(folder: Path, lora: dict[str, Any]) -> None:
    state = trained(folder, lora=FEW)[2].state()
    with pytest.raises(AdapterError) as caught:
        injected(folder, **lora)[2].load(state)
    assert caught.value.code == "adapter-mismatch"


def at_strength(adapter: Adapter, strength: float) -> None:
    for _, _, layer in adapter.modules.values():
        layer.set_scale("default", strength)


def test_disabled(folder: Path) -> None:
    family, model, adapter = trained(folder, lora=FEW)
    unet, base = model.components["unet"], unet_output(family.load(torch.float32, CPU).components["unet"])
    full = unet_output(unet)
    with adapter.disabled():
        assert torch.equal(unet_output(unet), base)
    assert torch.equal(unet_output(unet), full)
    assert all(parameter.requires_grad for parameter in adapter.parameters.values())


def test_using_other_weights_for_a_while(folder: Path) -> None:
    _, model, adapter = trained(folder, lora=FEW)
    average = {name: tensor * 0.5 for name, tensor in adapter.state().items()}
    before, output = adapter.state(), unet_output(model.components["unet"])
    with adapter.using(average):
        assert not torch.equal(unet_output(model.components["unet"]), output)
        assert adapter.entries()[next(iter(adapter.modules))].rank == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state().items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lora", [
    {"alpha": 2.0},
    {"alpha": 2.0, "use_rslora": True},
    {"alpha": 8.0, "use_dora": True},
    {"targets": EACH_KIND, "use_dora": True, "train_text_encoder": True},
])  # fmt: skip
def test_a_run_can_start_from_any_form(folder: Path, tmp_path: Path, form: str, lora: dict[str, Any]) -> None:
    """The same effect, for any alpha of the new run."""
    family, adapter, expected = adapted(folder, json.dumps(lora))
    path = exported(form, tmp_path / "lora.safetensors", family, adapter)
    changed = {**lora, "alpha": 16.0, "use_rslora": False, "init_from": str(path)}
    _, other, started = injected(folder, **changed)
    torch.testing.assert_close(unet_output(other.components["unet"]), expected, rtol=1e-4, atol=1e-5)
    theirs, ours = adapter.entries(), started.entries()
    assert ours.keys() == theirs.keys()
    for name, entry in theirs.items():  # the text encoders too
        torch.testing.assert_close(ours[name].update(), entry.update())
        assert entry.magnitude is None or torch.equal(ours[name].magnitude, entry.magnitude)


def test_a_plain_lora_starts_a_dora_with_the_same_effect(folder: Path, tmp_path: Path) -> None:
    family, model, adapter = trained(folder, lora={"rank": 4, "targets": EACH_KIND})
    path = exported("kohya", tmp_path / "lora.safetensors", family, adapter)
    _, other, _ = injected(folder, targets=EACH_KIND, use_dora=True, init_from=str(path))
    expected = unet_output(model.components["unet"])
    torch.testing.assert_close(unet_output(other.components["unet"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [4, 6])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_file_of_lower_ranks_starts_with_its_effect_and_room_to_learn(
    folder: Path, tmp_path: Path, use_dora: bool, rank: int
) -> None:
    """kohya's conv_dim in addition to network_dim: ranks 2 and 4 in one file, padded to the recipe's rank."""
    family, model, adapter = trained(folder, lora={**FEW, "use_dora": use_dora})
    path = exported("kohya", tmp_path / "lora.safetensors", family, adapter)
    lower_one_rank(adapter, path)
    expected = unet_output(model.components["unet"])
    _, other, started = injected(folder, rank=rank, use_dora=use_dora, init_from=str(path))
    torch.testing.assert_close(unet_output(other.components["unet"]), expected, rtol=1e-4, atol=1e-5)
    entries = started.entries()
    assert {entry.rank for entry in entries.values()} == {rank}
    assert all(entry.down[:2].any() and entry.down[-2:].any() for entry in entries.values())


def test_ranks_that_are_filled_up_are_said(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    family, _, adapter = trained(folder, lora=FEW)
    path = exported("kohya", tmp_path / "lora.safetensors", family, adapter)

    def start(rank: int) -> str:
        lora = tiny_recipe(folder, lora={**FEW, "rank": rank, "init_from": str(path)}).lora
        inject(family, family.load(torch.float32, CPU), lora, 3, said.append)
        return said.pop() if said else ""

    assert start(4) == "" and "rank 4" in start(6)
    lower_one_rank(adapter, path)
    assert "rank 2;" in start(4) and says(start(6), "adapters/rank-2-and-4") and said == []


@pytest.mark.parametrize(("source", "target", "words"), [
    ({"rank": 8}, {}, ("rank 8", "rank 4")),
    ({"use_dora": True}, {}, ("DoRA",)),
    ({"targets": "attention-mlp"}, {"targets": "attention"}, ("lora.targets",)),
    ({"targets": (MIDDLE_TARGETS, r"time_embedding\.linear_1")}, {"targets": "attention"}, ("lora.targets",)),
    ({"train_text_encoder": True}, {}, ("text encoders",)),
])  # fmt: skip
def test_a_start_that_does_not_fit_does_after_what_is_advised(
    folder: Path, tmp_path: Path, source: dict[str, Any], target: dict[str, Any], words: tuple[str, ...]
) -> None:
    family, _, adapter = trained(folder, lora={**FEW, **source})
    path = exported("kohya", tmp_path / "lora.safetensors", family, adapter)
    with pytest.raises(AdapterError) as caught:
        injected(folder, init_from=str(path), **target)
    assert all(word in str(caught.value) for word in words)
    advised = re.fullmatch(r"Set lora\.(\w+) to (.*)\.", caught.value.fix)
    assert advised is not None, caught.value.fix
    value = YAML(typ="safe").load(advised[2])
    started = injected(folder, init_from=str(path), **{**target, advised[1]: value})[2]
    assert adapter.modules.keys() <= started.modules.keys()


def lower_one_rank(adapter: Adapter, path: Path) -> str:
    """Give one module of a kohya file, and of the adapter that it was written from, half the rank; its name."""
    tensors, key = load_file(path), "lora_unet_middle_block_1_proj_in"
    tensors[f"{key}.lora_down.weight"] = tensors[f"{key}.lora_down.weight"][:2].contiguous()
    tensors[f"{key}.lora_up.weight"] = tensors[f"{key}.lora_up.weight"][:, :2].contiguous()
    tensors[f"{key}.alpha"] = torch.tensor(1.0)
    save_file(tensors, path)
    name = "unet.mid_block.attentions.0.proj_in"
    with torch.no_grad():
        adapter.parameters[f"{name}.lora_A"][2:] = 0.0
    return name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_file_can_be_attached(folder: Path, tmp_path: Path, form: str, use_dora: bool) -> None:
    family, adapter, expected = adapted(folder, json.dumps({"use_dora": use_dora}))
    path = exported(form, tmp_path / "lora.safetensors", family, adapter)
    bare = family.load(torch.float32, CPU)
    attached = attach_file(family, bare, path)
    torch.testing.assert_close(unet_output(bare.components["unet"]), expected, rtol=1e-4, atol=1e-5)
    assert attached.modules.keys() == adapter.modules.keys()


def test_a_file_with_several_ranks_is_attached(folder: Path, tmp_path: Path) -> None:
    """Ranks differ between modules in many files from other programs."""
    family, model, adapter = trained(folder, lora=FEW)
    path = exported("kohya", tmp_path / "lora.safetensors", family, adapter)
    name = lower_one_rank(adapter, path)
    bare = family.load(torch.float32, CPU)
    attached = attach_file(family, bare, path)
    assert attached.modules[name][2].r == {"default": 2}
    expected = unet_output(model.components["unet"])
    torch.testing.assert_close(unet_output(bare.components["unet"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wd_on_output", [[False], [True], [False, True, None]])
def test_a_dora_of_lycoris_draws_as_its_writer_meant(
    folder: Path, tmp_path: Path, wd_on_output: list[bool | None]
) -> None:
    """Against the base with LyCORIS' merged weights in it; the last file mixes both axes and plain modules."""
    family = family_for(tiny_recipe(folder))
    merged, bare = (family.load(torch.float32, CPU) for _ in range(2))
    rng, tensors = torch.Generator().manual_seed(5), {}
    base = unet_output(bare.components["unet"])
    for number, name in enumerate(MODULES):
        weight = merged.components["unet"].get_submodule(name).weight
        stored, changed = locon(weight.detach(), 3, rng, wd_on_output=wd_on_output[number % len(wd_on_output)])
        weight.data.copy_(changed)
        tensors |= {f"{family.lora_file_names.key('unet', name)}.{part}": tensor for part, tensor in stored.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    expected = unet_output(merged.components["unet"])
    attach_file(family, bare, tmp_path / "x.safetensors")
    assert (expected - base).norm() > 0.01 * base.norm()
    torch.testing.assert_close(unet_output(bare.components["unet"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wd_on_output", [None, True, False])
def test_at_strength_zero_the_base_is_drawn(folder: Path, tmp_path: Path, wd_on_output: bool | None) -> None:
    family = family_for(tiny_recipe(folder))
    bare = family.load(torch.float32, CPU)
    base = unet_output(bare.components["unet"])
    stored, _ = locon(torch.ones(16, 16), 3, torch.Generator().manual_seed(5), wd_on_output=wd_on_output)
    key = family.lora_file_names.key("unet", MODULES[0])
    save_file({f"{key}.{part}": tensor for part, tensor in stored.items()}, tmp_path / "x.safetensors")
    attach_file(family, bare, tmp_path / "x.safetensors", strength=0.0)
    assert torch.equal(unet_output(bare.components["unet"]), base)


def test_a_plain_module_in_a_dora_file_follows_the_strength(folder: Path, tmp_path: Path) -> None:
    """Its magnitudes do nothing at any strength, not only at 1."""
    family = family_for(tiny_recipe(folder))
    merged, bare = (family.load(torch.float32, CPU) for _ in range(2))
    rng, tensors = torch.Generator().manual_seed(5), {}
    for name, wd_on_output in ((MODULES[0], None), (MODULES[1], True)):
        weight = merged.components["unet"].get_submodule(name).weight
        stored, changed = locon(weight.detach(), 3, rng, wd_on_output=wd_on_output)
        if wd_on_output:  # half of the update, whole magnitudes
            halved = weight.detach() + 0.5 * (2.0 / 3 * stored["lora_up.weight"] @ stored["lora_down.weight"])
            weight.data.copy_(halved * stored["dora_scale"] / halved.norm(dim=1, keepdim=True))
        else:
            weight.data.lerp_(changed, 0.5)
        tensors |= {f"{family.lora_file_names.key('unet', name)}.{part}": tensor for part, tensor in stored.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    attach_file(family, bare, tmp_path / "x.safetensors", strength=0.5)
    expected = unet_output(merged.components["unet"])
    torch.testing.assert_close(unet_output(bare.components["unet"]), expected, rtol=1e-4, atol=1e-5)


def test_strength_of_an_attached_file(folder: Path, tmp_path: Path) -> None:
    family, model, adapter = trained(folder, lora=FEW)
    path = exported("kohya", tmp_path / "lora.safetensors", family, adapter)
    bare = family.load(torch.float32, CPU)
    attach_file(family, bare, path, strength=0.5)
    at_strength(adapter, 0.5)
    expected = unet_output(model.components["unet"])
    torch.testing.assert_close(unet_output(bare.components["unet"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("lora", "scale"), [
    ({"rank": 4}, 1.0),
    ({"rank": 4, "alpha": 2.0}, 0.5),
    ({"rank": 4, "alpha": 2.0, "use_rslora": True}, 1.0),
])  # fmt: skip
def test_scale(folder: Path, lora: dict[str, Any], scale: float) -> None:
    _, _, adapter = injected(folder, **lora)
    at_strength(adapter, 0.3)
    assert {trained_scale(layer) for _, _, layer in adapter.modules.values()} == {scale}
