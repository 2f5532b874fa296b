"""LoRA files from other programs: every format is read alike, and a file that is not a LoRA of this model is refused
with one sentence.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from lora_rocm.adapters.kinds.lora_entry import LoraEntry
from lora_rocm.adapters.lora_files.key_table import adaptable
from lora_rocm.adapters.lora_files.lora_reader import PEFT_WEIGHTS, components_of, read_lora
from lora_rocm.errors import AdapterError
from lora_rocm.export import writers
from lora_rocm.export.comfyui_check import apply_comfy
from lora_rocm.export.metadata import RunFacts
from tests.adapters.lycoris import locon
from tests.tiny_models import SHALLOW_WIDER, trained, unet_config, write_tiny_sdxl
from tests.wording import says

FACTS = RunFacts(steps=2, epochs=1, num_epochs=1)
ATTENTION = r".*\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"
NAME = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
SIDES = {"A": (2, 32), "B": (32, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("m") / "tiny sdxl", **SHALLOW_WIDER)


@pytest.fixture(scope="module")
def live(folder: Path) -> tuple[Any, Any, Any]:
    return trained(folder, lora={"rank": 4, "alpha": 2.0, "train_text_encoder": True}, output={"dtype": "fp32"})


def same(ours: dict[str, LoraEntry], theirs: dict[str, LoraEntry]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name].update(), theirs[name].update(), rtol=1e-5, atol=1e-7) for name in theirs
    )


def refused(path: Path, live: tuple[Any, Any, Any]) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read_lora(live[0], live[1].components, path)
    return caught.value


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_our_own_forms(live: tuple[Any, Any, Any], tmp_path: Path, form: str) -> None:
    family, model, adapter = live
    path = tmp_path / "lora.safetensors"
    writers.write(form, path, family, adapter, family.recipe, FACTS)
    assert same(read_lora(family, model.components, path), adapter.entries())
    assert components_of(family, path) == {"unet", "text_encoder", "text_encoder_2"}


def test_kohya_with_diffusers_block_names(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    family, model, adapter = live
    tensors = {}
    for name, entry in adapter.entries().items():
        component, path, _ = adapter.modules[name]
        key = (
            f"lora_unet_{path.replace('.', '_')}"
            if component == "unet"
            else family.lora_file_names.key(component, path)
        )
        tensors |= {f"{key}.lora_down.weight": entry.down, f"{key}.lora_up.weight": entry.up}
        tensors |= {f"{key}.alpha": torch.tensor(entry.scale * entry.rank)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert same(read_lora(family, model.components, tmp_path / "x.safetensors"), adapter.entries())


def test_kohya_without_alpha_has_scale_one(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    family, model, adapter = live
    path = tmp_path / "x.safetensors"
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    save_file({name: t for name, t in load_file(path).items() if not name.endswith("alpha")}, path)
    assert {entry.scale for entry in read_lora(family, model.components, path).values()} == {1.0}


def test_factors_of_different_ranks_are_named(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    family, model, adapter = live
    path = tmp_path / "x.safetensors"
    writers.write("kohya", path, family, adapter, family.recipe, FACTS)
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("lora_down.weight"))
    save_file({**tensors, name: tensors[name][:2].contiguous()}, path)
    assert says(refused(path, live).what, "adapters/ranks-4-and-2")


def bare_unet() -> Any:
    return UNet2DConditionModel(**unet_config(**SHALLOW_WIDER["unet"]))


def peft_unet(**config: Any) -> nn.Module:
    """A UNet adapted by PEFT alone, as a diffusers training script does it."""
    torch.manual_seed(0)
    unet = bare_unet()
    unet.add_adapter(LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False, **config))
    return unet


@pytest.mark.parametrize("config", [
    {"lora_alpha": 2},
    {"lora_alpha": 2, "use_rslora": True},
    {"lora_alpha": 8, "use_dora": True},
    {"lora_alpha": 8, "rank_pattern": {"attn2.to_k": 2}, "alpha_pattern": {"attn2.to_k": 3, "attn1.to_q": 5}},
])  # fmt: skip
def test_files_that_diffusers_writes(live: tuple[Any, Any, Any], tmp_path: Path, config: dict[str, Any]) -> None:
    unet = peft_unet(**config)
    StableDiffusionXLPipeline.save_lora_weights(
        tmp_path,
        unet_lora_layers=get_peft_model_state_dict(unet),
        unet_lora_adapter_metadata=unet.peft_config["default"].to_dict(),
    )
    entries = read_lora(live[0], live[1].components, tmp_path)
    check_against(unet, entries)


@pytest.mark.parametrize("config", [
    {"lora_alpha": 2},
    {"lora_alpha": 8, "use_dora": True, "use_rslora": True},
    {"lora_alpha": 8, "rank_pattern": {"attn2.to_k": 2}, "alpha_pattern": {"attn2.to_k": 3}},
])  # fmt: skip
def test_folders_that_peft_writes(live: tuple[Any, Any, Any], tmp_path: Path, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False, **config)
    model = get_peft_model(bare_unet(), settings)
    model.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        check_against(model.get_base_model(), read_lora(live[0], live[1].components, path))
    assert components_of(live[0], tmp_path) == {"unet"}


def check_against(unet: nn.Module, entries: dict[str, LoraEntry]) -> None:
    """Every layer's effect, as PEFT itself would merge it."""
    layers = {name: module for name, module in unet.named_modules() if hasattr(module, "lora_A") and module.lora_A}
    assert {f"unet.{name}" for name in layers} == entries.keys()
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight.detach().clone()
        layer.merge()
        merged = layer.get_base_layer().weight.detach()
        torch.testing.assert_close(entries[f"unet.{name}"].effect(weight), merged - weight, rtol=1e-3, atol=1e-5)
        layer.unmerge()


def test_old_names_of_diffusers(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """Files from before PEFT: attention processors, lora_linear_layer, no alpha."""
    unet = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor"
    text = "text_encoder.text_model.encoder.layers.0.self_attn"
    tensors = {}
    for key in (f"{unet}.to_q_lora", f"{unet}.to_out_lora", f"{text}.to_q_lora", f"{text}.to_out_lora"):
        tensors |= {f"{key}.down.weight": torch.randn(2, 32), f"{key}.up.weight": torch.randn(32, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    entries = read_lora(live[0], live[1].components, tmp_path / "x.safetensors")
    block = NAME.removesuffix(".to_q")
    attention = "text_encoder.encoder.layers.0.self_attn"
    assert entries.keys() == {NAME, f"{block}.to_out.0", f"{attention}.q_proj", f"{attention}.out_proj"}
    assert torch.equal(entries[NAME].up, tensors[f"{unet}.to_q_lora.up.weight"])
    assert entries[NAME].scale == 1.0


def test_a_lora_of_another_model(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    down, up = torch.zeros(2, 32), torch.zeros(32, 2)
    for key in ("lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_down_blocks_0_attentions_0_proj_in"):
        save_file({f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}, tmp_path / "x.safetensors")
        error = refused(tmp_path / "x.safetensors", live)
        assert error.code == "lora-of-another-model"
        assert key in error.what
    key = "lora_unet_middle_block_1_proj_in"
    save_file({f"{key}.lora_down.weight": torch.zeros(2, 64), f"{key}.lora_up.weight": up}, tmp_path / "x.safetensors")
    error = refused(tmp_path / "x.safetensors", live)
    assert error.code == "lora-of-another-model"
    assert "64" in error.what


@pytest.mark.parametrize(("tensors", "code"), [
    ({"lora_unet_x.hada_w1_a": 1, "lora_unet_x.hada_w1_b": 1}, "lora-incomplete"),
    ({"lora_unet_x.lokr_w1": 1}, "lora-incomplete"),
    ({"lora_unet_x.oft_diag": 1}, "lora-kind"),
    ({"lora_unet_x.lora_mid.weight": 1, "lora_unet_x.lora_up.weight": 1}, "lora-kind"),
    ({"model.diffusion_model.input_blocks.0.0.weight": 1}, "lora-empty"),
    ({"lora_unet_middle_block_1_proj_in.lora_down.weight": 1}, "lora-incomplete"),
    ({"unet.mid_block.lora_B.weight": 1}, "lora-incomplete"),
])  # fmt: skip
def test_what_is_no_lora(live: tuple[Any, Any, Any], tmp_path: Path, tensors: dict[str, int], code: str) -> None:
    save_file({name: torch.zeros(size, 1) for name, size in tensors.items()}, tmp_path / "x.safetensors")
    assert refused(tmp_path / "x.safetensors", live).code == code


BLOCK = "mid_block.attentions.0.transformer_blocks.0"
SHAPES = {
    f"{BLOCK}.attn1.to_q": (32, 32),  # square: only dora_scale's shape gives the axis
    f"{BLOCK}.attn2.to_k": (32, 80),
    f"{BLOCK}.ff.net.0.proj": (256, 32),
    "mid_block.resnets.0.conv1": (32, 32, 3, 3),
    "down_blocks.1.resnets.0.conv1": (32, 16, 3, 3),
    "down_blocks.1.resnets.0.conv_shortcut": (32, 16, 1, 1),
}


def write_locon(live: tuple[Any, Any, Any], path: Path, wd_on_output: bool | None) -> dict[str, tuple[Any, Any]]:
    """A kohya file written by LyCORIS' formulas; module path -> (base weight, merged weight)."""
    family, model, _ = live
    rng, tensors, merged = torch.Generator().manual_seed(5), {}, {}
    layers = dict(adaptable(model.components["unet"]))
    for name, shape in SHAPES.items():
        weight = layers[name].weight.detach()
        assert weight.shape == shape
        stored, changed = locon(weight, 3, rng, wd_on_output=wd_on_output)
        tensors |= {f"{family.lora_file_names.key('unet', name)}.{part}": tensor for part, tensor in stored.items()}
        merged[name] = (weight, changed)
    save_file(tensors, path)
    return merged


@pytest.mark.parametrize("wd_on_output", [None, True, False])
def test_a_dora_of_lycoris_is_read_along_its_axis(
    live: tuple[Any, Any, Any], tmp_path: Path, wd_on_output: bool | None
) -> None:
    merged = write_locon(live, tmp_path / "x.safetensors", wd_on_output)
    entries = read_lora(live[0], live[1].components, tmp_path / "x.safetensors")
    in_comfy = apply_comfy(
        load_file(tmp_path / "x.safetensors"),
        {live[0].lora_file_names.key("unet", name): weight for name, (weight, _) in merged.items()},
    )
    for (_, patched), (name, (weight, changed)) in zip(in_comfy, merged.items(), strict=True):
        torch.testing.assert_close(entries[f"unet.{name}"].effect(weight), changed - weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(patched, changed, rtol=1e-5, atol=1e-6)


QUICK_SHAPES = (f"{BLOCK}.attn1.to_q", "down_blocks.1.resnets.0.conv1", "down_blocks.1.resnets.0.conv_shortcut")


@pytest.mark.parametrize("name", [name if name in QUICK_SHAPES else pytest.param(name, marks=pytest.mark.slow)
                                  for name in SHAPES])  # fmt: skip
def test_magnitudes_of_another_length_are_refused_with_file_module_and_shape(
    live: tuple[Any, Any, Any], tmp_path: Path, name: str
) -> None:
    write_locon(live, tmp_path / "x.safetensors", wd_on_output=True)
    key, (outputs, inputs, *_) = f"{live[0].lora_file_names.key('unet', name)}.dora_scale", SHAPES[name]
    tensors = load_file(tmp_path / "x.safetensors")
    for shape in ((7, 1), (1, 7), (1,), (), (1, outputs * inputs), (outputs, inputs), (inputs + 1, 1), (0,)):
        save_file(tensors | {key: torch.ones(shape)}, tmp_path / "y.safetensors")
        error = refused(tmp_path / "y.safetensors", live)
        assert error.code == "lora-magnitudes" and error.where.endswith("y.safetensors")
        assert key.removesuffix(".dora_scale") in error.what and str(list(shape)) in error.what


@pytest.mark.parametrize("config", [
    {"peft_type": "LOHA"},
    {"peft_type": "IA3"},
    {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "olora"},
    {"bias": "all"},
    {"modules_to_save": ["conv_in"]},
    {"use_qalora": True},
])  # fmt: skip
@pytest.mark.parametrize("form", ["peft", "diffusers"])
def test_a_config_that_asks_for_more_than_a_lora(
    live: tuple[Any, Any, Any], tmp_path: Path, config: dict[str, Any], form: str
) -> None:
    tensors = {f"{NAME.removeprefix('unet.')}.lora_{side}.weight": torch.ones(shape) for side, shape in SIDES.items()}
    plain = {"peft_type": "LORA", "lora_alpha": 2, "r": 2, "init_lora_weights": "gaussian", "bias": "none"}

    def write(config: dict[str, Any]) -> None:
        if form == "peft":
            save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, tmp_path / PEFT_WEIGHTS)
            (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        else:
            metadata = {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in config.items()})}
            save_file({f"unet.{n}": t for n, t in tensors.items()}, tmp_path / "x.safetensors", metadata)

    write(plain)
    assert read_lora(live[0], live[1].components, tmp_path)[NAME].scale == 1.0, "the control"
    write(plain | config)
    error = refused(tmp_path, live)
    assert error.code == "lora-kind" and (str(next(iter(config))) in error.what or "LoRA" in error.what)


@pytest.mark.parametrize("ending", [
    "w_norm", "b_norm", "diff", "diff_b", "set_weight", "reshape_weight", "a1.weight", "on_input", "weight", "bias",
    "hada_w1_a", "lokr_w1", "oft_blocks", "lora_mid.weight", "lora_up.bias", "lora_down.weight", "gate",
])  # fmt: skip
@pytest.mark.parametrize("key", ["lora_unet_middle_block_0_in_layers_0", "unet.mid_block.resnets.0.norm1"])
def test_a_file_with_more_than_a_lora_is_refused(
    live: tuple[Any, Any, Any], tmp_path: Path, key: str, ending: str
) -> None:
    module = "lora_unet_middle_block_1_proj_in" if key.startswith("lora_") else NAME
    tensors = {f"{module}.lora_{side}.weight": torch.ones(shape) for side, shape in zip(
        ("down", "up") if key.startswith("lora_") else "AB", SIDES.values(), strict=True)}  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    assert len(read_lora(live[0], live[1].components, tmp_path / "x.safetensors")) == 1, "the control"
    save_file(tensors | {f"{key}.{ending}": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    error = refused(tmp_path / "x.safetensors", live)
    assert error.code in ("lora-parts", "lora-incomplete") and key in error.what and error.fix


def test_embeddings_that_are_bundled_are_named(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    said: list[str] = []
    tensors = {f"lora_unet_middle_block_1_proj_in.lora_{side}.weight": torch.ones(shape) for side, shape in zip(
        ("down", "up"), SIDES.values(), strict=True)}  # fmt: skip
    tensors["lora_unet_middle_block_1_proj_in.alpha"] = torch.tensor(1.0)
    save_file(tensors | {"bundle_emb.zibu.clip_l": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert len(read_lora(live[0], live[1].components, tmp_path / "x.safetensors", said.append)) == 1
    assert len(said) == 1 and "bundle_emb.zibu.clip_l" in said[0]


def test_alphas_beside_the_factors_of_the_diffusers_form(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """ComfyUI takes them in any format; read as if there were none, the effect would be four times as strong."""
    tensors = {f"{NAME}.lora_{side}.weight": torch.ones(shape) for side, shape in SIDES.items()}
    save_file(tensors | {f"{NAME}.alpha": torch.tensor(0.5)}, tmp_path / "x.safetensors")
    assert read_lora(live[0], live[1].components, tmp_path / "x.safetensors")[NAME].scale == 0.25


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_factors_stored_as_whole_numbers(live: tuple[Any, Any, Any], tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"{NAME}.lora_{side}.weight": torch.ones(shape) for side, shape in SIDES.items()}
    for side in tensors:
        save_file(tensors | {side: tensors[side].to(dtype)}, tmp_path / "x.safetensors")
        error = refused(tmp_path / "x.safetensors", live)
        assert error.code == "lora-unreadable" and "integers" in error.what
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    assert read_lora(live[0], live[1].components, tmp_path / "x.safetensors")


def test_a_module_that_stands_in_the_file_under_two_names(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """sgm's and diffusers' names of one layer: each program would take another of the two, or both."""
    tensors = {}
    for key in ("lora_unet_middle_block_1_proj_in", "lora_unet_mid_block_attentions_0_proj_in"):
        tensors |= {f"{key}.lora_down.weight": torch.ones(2, 32), f"{key}.lora_up.weight": torch.ones(32, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert says(refused(tmp_path / "x.safetensors", live).what, "adapters/are-the-same-module")


def test_values_that_are_no_numbers(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    key = "lora_unet_middle_block_1_proj_in"
    tensors = {f"{key}.lora_down.weight": torch.zeros(2, 32), f"{key}.lora_up.weight": torch.full((32, 2), torch.inf)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert refused(tmp_path / "x.safetensors", live).code == "lora-not-finite"


def test_missing_pickled_damaged(live: tuple[Any, Any, Any], tmp_path: Path) -> None:
    assert refused(tmp_path / "none.safetensors", live).code == "lora-missing"
    assert refused(tmp_path, live).code == "lora-missing"
    torch.save({}, tmp_path / "x.bin")
    assert refused(tmp_path / "x.bin", live).code == "pickle-refused"
    (tmp_path / "y.safetensors").write_bytes(b"\0" * 100)
    assert refused(tmp_path / "y.safetensors", live).code == "weights-damaged"
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text("{", encoding="utf-8")
    shutil.copy(tmp_path / "y.safetensors", peft / "adapter_model.safetensors")
    assert refused(peft, live).code == "lora-unreadable"
    (peft / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert refused(peft, live).code == "weights-damaged"
    (peft / "adapter_model.safetensors").unlink()
    assert refused(peft, live).code == "weights-unreadable"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.binary(min_size=1, max_size=40), st.integers(0, 300), st.sampled_from(["kohya", "diffusers"]))
def test_a_mutated_file_is_never_a_traceback(
    live: tuple[Any, Any, Any], tmp_path: Path, noise: bytes, place: int, form: str
) -> None:
    family, model, adapter = live
    path = tmp_path / "x.safetensors"
    pristine = tmp_path / f"{form}.safetensors"
    if not pristine.exists():
        writers.write(form, pristine, family, adapter, family.recipe, FACTS)
    content = bytearray(pristine.read_bytes())
    place = place if place < 150 else 8 + (place * 977) % (len(content) - 8)
    content[place : place + len(noise)] = noise
    path.write_bytes(bytes(content))
    try:
        read_lora(family, model.components, path)
    except AdapterError as error:
        assert error.what


KEYS = st.sampled_from(
    [
        f"{module}.{kind}"
        for module in ("lora_unet_middle_block_1_proj_in", "unet.mid_block.attentions.0.proj_in", "lora_te1_x", "x.y")
        for kind in ("lora_down.weight", "lora_up.weight", "alpha", "dora_scale", "lora_A.weight", "lora_B.weight")
    ]
)
CONFIGS = st.one_of(
    st.text(max_size=8),
    st.dictionaries(
        st.sampled_from(["unet.r", "unet.lora_alpha", "unet.alpha_pattern", "unet.use_rslora"]),
        st.one_of(st.none(), st.integers(-2, 9), st.text(max_size=3), st.dictionaries(st.text(max_size=3), st.none())),
    ).map(json.dumps),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.dictionaries(KEYS, st.lists(st.sampled_from([0, 1, 2, 32]), max_size=3), min_size=1), CONFIGS)
def test_nonsense_is_never_a_traceback(
    live: tuple[Any, Any, Any], tmp_path: Path, shapes: dict[str, list[int]], config: str
) -> None:
    family, model, _ = live
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": config})
    try:
        assert read_lora(family, model.components, tmp_path / "x.safetensors")
    except AdapterError as error:
        assert error.what
