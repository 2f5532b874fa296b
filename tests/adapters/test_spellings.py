"""``inspect`` promises that a file can start a run exactly where the reader reads it: all spellings."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lora_rocm.adapters.lora_files.key_table import KeyTable, adaptable, canonical, main_component
from lora_rocm.adapters.lora_files.lora_reader import components_of, read_lora
from lora_rocm.base_models.loading import BaseSource
from lora_rocm.commands.inspect_file import inspect
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import family_for
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapter_spellings import place_of
from tests.families.common.dit.cases import Anima, Case, Flux, ZImage
from tests.tiny_anima import write_tiny_anima
from tests.tiny_flux import write_tiny_flux
from tests.tiny_models import tiny_recipe
from tests.tiny_sd import write_tiny_sd
from tests.wording import worded

FAMILIES = ("sdxl", "sd15", "sd2", "flux", "z-image", "anima", "causal-lm")
BUILTIN = {"causal-lm": "builtin:tiny-llama", "sdxl": "builtin:tiny-sdxl", "z-image": "builtin:tiny-z-image"}
RANK, MANY = 2, 100
Module = tuple[str, tuple[int, ...]]


@cache
def hollow(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model of a family as family and components without weights."""
    folder = Path(mkdtemp(prefix="tiny-")) / name
    if name in ("sd15", "sd2"):
        write_tiny_sd(folder, name)  # type: ignore[arg-type]
    elif name in ("flux", "anima"):
        {"flux": write_tiny_flux, "anima": write_tiny_anima}[name](folder)
    base = BUILTIN.get(name, str(folder))
    family = family_for(tiny_recipe(base, model={"family": name}))
    parts = {part: family.skeleton(part) for part in family.lora_file_names.prefixes}
    rmtree(folder.parent)
    return family, parts


@cache
def spelled(name: str) -> dict[str, list[Module]]:
    """Spelling -> (key, shape of its weight) of all modules of a family."""
    family, components = hollow(name)
    main = main_component(family)
    found: dict[str, list[Module]] = {}

    def add(spelling: str, key: str, shape: tuple[int, ...]) -> None:
        found.setdefault(spelling, []).append((key, shape))

    for component, root in components.items():
        for path, layer in adaptable(root):
            shape = tuple(dense_shape(layer))
            add("our own", family.lora_file_names.key(component, path), shape)
            if name == "causal-lm":
                add("PEFT", f"base_model.model.{path}", shape)
                add("bare", path, shape)
                continue
            add("diffusers", f"{component}.{path}", shape)
            add("compiled", f"{component}._orig_mod.{path}", shape)
            add("OneTrainer's old", f"lora_{component}_{path.replace('.', '_')}", shape)
            if component == main:
                add("ComfyUI", f"diffusion_model.{path}", shape)
                add("LyCORIS", f"lycoris_{path.replace('.', '_')}", shape)
                add("PEFT", f"base_model.model.{path}", shape)
            else:
                clip = "clip_l" if component == "text_encoder" else "clip_g"
                inner = path.removeprefix("text_model.")
                add("OMI", f"{clip}.text_model.{inner}", shape)
                add("OneTrainer's COMFY", f"text_encoders.{clip}.transformer.text_model.{inner}", shape)
    for spelling, modules in of_original(name).items():
        found[spelling] = found.get(spelling, []) + modules
    return found


def of_original(name: str) -> dict[str, list[Module]]:
    """As ``spelled``, with the names of the original release."""
    family, components = hollow(name)
    main, found = main_component(family), dict[str, list[Module]]()

    def add(spelling: str, key: str, shape: tuple[int, ...]) -> None:
        found.setdefault(spelling, []).append((key, shape))

    originals = KeyTable({main: components[main]}, family.lora_file_names.original)
    for key, parts in originals.parts.items():
        shape = originals.shapes[key]
        for prefix in ("diffusion_model.", "", "diffusion_model._orig_mod."):
            add(f"original names behind {prefix!r}", prefix + key, shape)
        if name not in ("sd15", "sd2"):  # kohya's scripts have diffusers' names of these
            add("kohya", f"lora_unet_{key.replace('.', '_')}", shape)
            add("compiled kohya", f"lora_unet__orig_mod_{key.replace('.', '_')}", shape)
        for place, part in enumerate(parts):
            whole = len({part.module for part in parts}) == 1
            end = f".{place}" if not whole else ".proj" if key == "img_in" else ""
            if place and whole:  # halves of one module, in another order
                continue
            shape = shape if whole else (part.count, *shape[1:])
            add("OMI", f"{main}.{key}{end}", shape)
    return found


def pair(key: str, shape: tuple[int, ...], ends: tuple[str, str]) -> dict[str, Tensor]:
    rows, *inputs = shape
    return {
        f"{key}.{ends[0]}": torch.full((RANK, *inputs), 0.5),
        f"{key}.{ends[1]}": torch.full((rows, RANK, *[1] * (len(inputs) - 1)), 0.5),
    }


ENDS = {
    "kohya's": ("lora_down.weight", "lora_up.weight"),
    "PEFT's": ("lora_A.weight", "lora_B.weight"),
    "default": ("lora_A.default.weight", "lora_B.default.weight"),
    "default_0": ("lora_A.default_0.weight", "lora_B.default_0.weight"),
    "another name": ("lora_A.my-style.weight", "lora_B.my-style.weight"),
}


def able(name: str, path: Path) -> tuple[bool, str]:
    """Whether the reader accepts a file for a family, and its message."""
    family, components = hollow(name)
    try:
        components_of(family, path)
        return bool(read_lora(family, components, path)), ""
    except AdapterError as error:
        return False, f"{error.code}: {error.what}"


def agree(name: str, path: Path) -> bool:
    """The promise and the ability, which are one."""
    found, (reads, why) = inspect(path), able(name, path)
    promised = name in found["trainable"]
    if name not in found["families"]:  # names and widths cannot show it, at least in a tiny model: no promise
        assert not promised
        return reads
    assert promised == reads, (found, why)
    return reads


@pytest.mark.parametrize("name", FAMILIES)
def test_every_module_is_read_in_every_spelling(tmp_path: Path, name: str) -> None:
    for number, (spelling, modules) in enumerate(spelled(name).items()):
        some = modules[number % 9 :: 9] if len(modules) > MANY else modules
        check_all_read(tmp_path / "x.safetensors", name, some, ENDS[sorted(ENDS)[number % len(ENDS)]], spelling)


def check_all_read(path: Path, name: str, modules: list[Module], ends: tuple[str, str], spelling: str) -> None:
    family, components = hollow(name)
    tensors: dict[str, Tensor] = {}
    for key, shape in modules:
        tensors |= pair(key, shape, ends) | {f"{key}.alpha": torch.tensor(1.0)}
    save_file(tensors, path)
    entries = read_lora(family, components, path)
    wanted = {canonical(c, module) for c, root in components.items() for module, _ in adaptable(root)}
    mains = {each for each in wanted if each.startswith(f"{main_component(family)}.")}
    assert entries.keys() in (wanted, mains, wanted - mains) or len(entries) == len(modules), spelling
    assert {entry.scale for entry in entries.values()} <= {1.0 / RANK, 1.0}, spelling
    assert agree(name, path), spelling


CHANGES = (
    "none",
    "an unknown module",
    "half a module",
    "an alpha",
    "another number",
    "no alphas",
    "two adapters",
    "DoRA",
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120, deadline=None)
@given(st.data())
def test_what_inspect_promises_the_reader_does(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FAMILIES))
    modules = spelled(name)[data.draw(st.sampled_from(sorted(spelled(name))))]
    some = data.draw(st.lists(st.sampled_from(modules), min_size=1, max_size=6, unique=True))
    ends, change = data.draw(st.sampled_from(sorted(ENDS))), data.draw(st.sampled_from(CHANGES))
    tensors: dict[str, Tensor] = {}
    for key, shape in some:
        tensors |= pair(key, shape, ENDS[ends]) | {f"{key}.alpha": torch.tensor(1.0)}
    key, shape = some[0]
    if change == "an unknown module":
        prefix = key[: len(key) - len(key.lstrip("."))] + key.partition(".")[0]
        tensors |= pair(f"{prefix}.nowhere.to_find" if "." in key else f"{key}_nowhere", shape, ENDS[ends])
    elif change == "half a module":
        tensors.pop(f"{key}.{ENDS[ends][0]}")
    elif change == "an alpha":
        tensors.pop(f"{key}.alpha")
    elif change == "no alphas":
        tensors = {each: tensor for each, tensor in tensors.items() if not each.endswith(".alpha")}
    elif change == "two adapters":
        tensors |= pair(key, shape, ("lora_A.one.weight", "lora_B.one.weight"))
    elif change == "another number":
        tensors[f"{key}.alpha"] = torch.tensor([1.0, 2.0])
    elif change == "DoRA":
        tensors[f"{key}.dora_scale"] = torch.ones(shape[0], *[1] * (len(shape) - 1))
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    agree(name, path)


@pytest.mark.parametrize("case", [Flux, ZImage, Anima])
def test_names_of_published_models_are_known(case: type[Case]) -> None:
    full = BaseSource("published", case.layout, case.layout.configs, None).skeleton("transformer")
    assert all(place_of(case.name, path) is not None for path, _ in adaptable(full))


XLABS = {
    "double_blocks.0.processor.qkv_lora1": (96, 32),
    "double_blocks.0.processor.qkv_lora2": (96, 32),
    "double_blocks.0.processor.proj_lora1": (32, 32),
    "double_blocks.0.processor.proj_lora2": (32, 32),
    "single_blocks.0.processor.qkv_lora": (96, 32),
    "single_blocks.0.processor.proj_lora": (32, 160),
}
"""Names and shapes of XLabs-AI/flux-RealismLora, narrowed from 3,072."""


def test_xlabs_flux_is_read_as_diffusers_converts_it(tmp_path: Path) -> None:
    from diffusers.loaders.lora_conversion_utils import _convert_xlabs_flux_lora_to_diffusers

    rng, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for key, (rows, inputs) in XLABS.items():
        tensors[f"{key}.down.weight"] = torch.randn(RANK, inputs, generator=rng)
        tensors[f"{key}.up.weight"] = torch.randn(rows, RANK, generator=rng)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    family, components = hollow("flux")
    entries = read_lora(family, components, path)
    theirs = _convert_xlabs_flux_lora_to_diffusers(dict(tensors))
    assert entries.keys() == {name.partition(".lora_")[0] for name in theirs}
    for name, entry in entries.items():
        wanted = theirs[f"{name}.lora_B.weight"] @ theirs[f"{name}.lora_A.weight"]
        torch.testing.assert_close(entry.update(), wanted)
    found = inspect(path)
    assert found["trainable"] == ["flux"] and found["adapter"]["readers"]["diffusers"] == "reads it"
    save_file(tensors | {"double_blocks.0.processor.other_lora.down.weight": torch.ones(1, 1)}, path)
    assert not agree("flux", path)


@pytest.mark.parametrize(("spelling", "wanted"), [
    ("unet._orig_mod.mid_block.attentions.0.proj_in", None),
    ("unet.mid_block.attentions.0.proj_in", "reads it"),
    ("unet.middle_block.1.proj_in", "not known"),
])  # fmt: skip
def test_a_name_with_a_wrapper_is_promised_to_no_program(tmp_path: Path, spelling: str, wanted: str | None) -> None:
    text = "text_encoder_2.text_model.encoder.layers.0.mlp.fc1"
    shapes = {spelling: (32, 32), text: (32, 32)}
    tensors = {
        name: tensor for key, shape in shapes.items() for name, tensor in pair(key, shape, ENDS["PEFT's"]).items()
    }
    save_file(tensors, tmp_path / "x.safetensors")
    readers = inspect(tmp_path / "x.safetensors")["adapter"]["readers"]
    assert (readers and readers["diffusers"]) == wanted


# A strength that is lost.

MODULE = "model.layers.0.self_attn.q_proj"


def write_peft(folder: Path, config: dict[str, Any] | None, alpha: bool = False, ends: str = "PEFT's") -> Path:
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for path, shape in spelled("causal-lm")["PEFT"][:3]:
        tensors |= pair(path, shape, ENDS[ends]) | ({f"{path}.alpha": torch.tensor(6.0)} if alpha else {})
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").unlink(missing_ok=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


GOOD = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}


def test_a_peft_folder_without_its_config_is_refused(tmp_path: Path) -> None:
    family, components = hollow("causal-lm")
    folder = write_peft(tmp_path / "peft", GOOD)
    for path in (folder, folder / "adapter_model.safetensors"):
        assert {entry.scale for entry in read_lora(family, components, path).values()} == {3.0}, "the control"
        assert agree("causal-lm", path)
    write_peft(folder, None)
    renamed = tmp_path / "renamed.safetensors"
    (folder / "adapter_model.safetensors").rename(renamed)
    write_peft(folder, None)
    for path in (folder, folder / "adapter_model.safetensors", renamed):
        with pytest.raises(AdapterError) as caught:
            read_lora(family, components, path)
        missing = (path if path.is_dir() else path.parent) / "adapter_config.json"
        assert caught.value.code == "lora-strength" and str(missing) in caught.value.what
        assert not agree("causal-lm", path) and inspect(path)["adapter"]["readers"] is None
    write_peft(folder, None, alpha=True)  # its strength is in it
    assert {entry.scale for entry in read_lora(family, components, folder).values()} == {3.0}


@pytest.mark.parametrize("config", [
    {},
    {**GOOD, "r": None},
    {**GOOD, "r": 4},
    {**GOOD, "lora_alpha": None},
    {**GOOD, "lora_alpha": "6"},
    {**GOOD, "lora_alpha": True},
    {**GOOD, "use_rslora": "false"},
    {**GOOD, "rank_pattern": {"q_proj": 8}},
    {**GOOD, "alpha_pattern": {"q_proj": None}},
    {**GOOD, "use_dora": True},
    {name: value for name, value in GOOD.items() if name != "r"},
    {name: value for name, value in GOOD.items() if name != "lora_alpha"},
])  # fmt: skip
def test_a_config_that_does_not_say_the_strength_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_peft(tmp_path / "peft", config)
    with pytest.raises(AdapterError) as caught:
        read_lora(*hollow("causal-lm"), folder)
    assert caught.value.code == "lora-strength" and not agree("causal-lm", folder)


def test_a_component_without_its_config_is_not_left_out(tmp_path: Path) -> None:
    family, components = hollow("sdxl")
    modules = {"unet": "mid_block.attentions.0.proj_in", "text_encoder_2": "encoder.layers.0.mlp.fc1"}
    for component, module in modules.items():
        (tmp_path / component).mkdir()
        shapes = {name: tuple(dense_shape(layer)) for name, layer in adaptable(components[component])}
        shape = next(shape for name, shape in shapes.items() if name.endswith(module))
        tensors = pair(f"base_model.model.{module}", shape, ENDS["PEFT's"])
        save_file(tensors, tmp_path / component / "adapter_model.safetensors")
        (tmp_path / component / "adapter_config.json").write_text(json.dumps(GOOD), encoding="utf-8")
    assert len(read_lora(family, components, tmp_path)) == 2, "the control"
    for component in modules:
        config = tmp_path / component / "adapter_config.json"
        content = config.read_bytes()
        config.unlink()
        with pytest.raises(AdapterError) as caught:
            read_lora(family, components, tmp_path)
        assert caught.value.code == "lora-strength" and str(config) in caught.value.what
        assert "sdxl" not in inspect(tmp_path)["trainable"]
        config.write_bytes(content)


def test_metadata_for_some_components_or_without_their_names(tmp_path: Path) -> None:
    """diffusers' save_lora_adapter writes names and config of one component without the component's name."""
    family, components = hollow("flux")
    module, other = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"
    shape, path = (32, 32), tmp_path / "x.safetensors"
    config = {"r": RANK, "lora_alpha": 6}

    def read(keys: tuple[str, ...], fields: dict[str, Any], more: dict[str, Tensor] | None = None) -> set[float]:
        tensors = {name: t for key in keys for name, t in pair(key, shape, ENDS["PEFT's"]).items()}
        save_file(tensors | (more or {}), path, {"lora_adapter_metadata": json.dumps(fields)})
        return {entry.scale for entry in read_lora(family, components, path).values()}

    assert read((module,), config) == {3.0}
    assert read((f"transformer.{module}",), {f"transformer.{key}": value for key, value in config.items()}) == {3.0}
    assert read((f"diffusion_model.{module}",), {f"transformer.{key}": v for key, v in config.items()}) == {3.0}
    assert read((module,), {}) == {1.0}
    alpha = {f"{module}.alpha": torch.tensor(1.0)}
    assert read((module,), {}, alpha) == {0.5}
    with pytest.raises(AdapterError) as caught:
        read((module, other), {}, alpha)
    assert caught.value.code == "lora-strength" and other in caught.value.what


def test_a_file_without_alphas_is_read_at_strength_1_and_says_so(tmp_path: Path) -> None:
    family, components = hollow("sdxl")
    said: list[str] = []
    key, path = "lora_unet_middle_block_1_proj_in", tmp_path / "x.safetensors"
    shape = next(shape for each, shape in spelled("sdxl")["our own"] if each == key)
    save_file(pair(key, shape, ENDS["kohya's"]), path)
    assert [entry.scale for entry in read_lora(family, components, path, said.append).values()] == [1.0]
    assert len(said) == 1 and path.name in said[0]
    save_file(pair(key, shape, ENDS["kohya's"]) | {f"{key}.alpha": torch.tensor(1.0)}, path)
    said.clear()
    assert read_lora(family, components, path, said.append) and said == [], "the control"


def test_a_dora_of_ai_toolkit(tmp_path: Path) -> None:
    """In names of PEFT it is of strength 1; in kohya's, ai-toolkit leaves the alphas out, of any value."""
    family, components = hollow("flux")
    module, magnitudes = "transformer.transformer_blocks.0.attn.to_q", torch.arange(1.0, 33.0)
    path = tmp_path / "x.safetensors"
    save_file(pair(module, (32, 32), ENDS["PEFT's"]) | {f"{module}.magnitude": magnitudes}, path)
    (entry,) = read_lora(family, components, path).values()
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    moved = weight + entry.additive().update()
    torch.testing.assert_close(entry.effect(weight), moved * (magnitudes / moved.norm(dim=1)).view(-1, 1) - weight)
    assert agree("flux", path) and inspect(path)["adapter"]["kind"] == worded("adapters/lora-and-dora")
    key = "lora_unet_transformer_blocks_0_attn_to_q"
    save_file(pair(key, (32, 32), ENDS["kohya's"]) | {f"{key}.magnitude": magnitudes}, path)
    assert not agree("flux", path) and able("flux", path)[1].startswith("lora-strength")


def test_a_strength_beyond_all_numbers_names_the_file(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "peft", {**GOOD, "lora_alpha": 1e308})
    with pytest.raises(AdapterError) as caught:
        read_lora(*hollow("causal-lm"), folder)
    assert caught.value.code == "lora-not-finite" and str(folder) in caught.value.where
