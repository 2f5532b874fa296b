"""Families with a transformer against diffusers' own pipelines: loss, gradients, previews, files and their names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.adapters.lora_files.key_table import KeyTable
from lora_rocm.adapters.lora_files.lora_reader import components_of, read_lora
from lora_rocm.adapters.targets import targets
from lora_rocm.base_models.loading import BaseSource
from lora_rocm.children.check_base import weigh
from lora_rocm.children.plan import packed_encoders
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.export.comfyui_check import apply_comfy
from lora_rocm.export.metadata import RunFacts
from lora_rocm.export.writers import kohya_tensors, verify, write
from lora_rocm.families.base import LoadedModel, PreviewRequest
from lora_rocm.families.common.caption_lm import STATES
from lora_rocm.families.common.dit.sampling import denoised
from lora_rocm.families.common.vae import decode
from lora_rocm.families.objectives.loss import losses
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import dense_weight, is_packed
from lora_rocm.planning.format_errors import format_errors
from tests.families.common.dit import cases
from tests.families.common.dit.cases import CHANNELS, CPU, TEXTS, Anima, Case, Flux, Schnell, ZImage, adapted
from tests.judging import inspect
from tests.lora_files import cannot_read_by_inspect, without_share
from tests.wording import says

FAMILIES = (ZImage, Flux, Anima)


def of(*kinds: type[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", kinds, indirect=True, ids=lambda kind: kind.__name__)


def gradients(loss_B: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss_B.sum(), list(leaves.values())), strict=True))


@of(*FAMILIES)
def test_loss_and_gradients_are_those_of_the_pipeline_s_parts(case: Case) -> None:
    """Images are encoded one at a time: sums of a batch have another order, and attention's gradients show it."""
    family, model, adapter = case.adapted
    pixels = torch.rand(2, 3, 64, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    encode = family.encoders()[0].load(plain_placement(CPU))
    images = [encode({IMAGE: image}) for image in pixels]
    text = case.text(2)
    batch = {**text, **{name: torch.stack([image[name] for image in images]) for name in images[0]}}
    draws = family.objective.draw(batch, [4, 5]).tensors
    loss_B = losses(family, model, batch, draws)
    found = gradients(loss_B, adapter.leaves)
    assert all(grad.any() for grad in found.values())
    # the same by diffusers
    with torch.no_grad():
        each = [case.posterior(image[None]) for image in pixels]
    mean, std = (torch.cat([getattr(posterior, name) for posterior in each]) for name in ("mean", "std"))
    latents = case.normalised(mean + std * draws["posterior"])
    sigma = draws["sigma"][:, None, None, None]

    def reference(noise: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The losses, and how far off each gradient is, as a share."""
        noisy = (1.0 - sigma) * latents + sigma * noise
        predicted = case.velocity(model.components["transformer"], noisy, draws["sigma"], text)
        wanted_B = (predicted - (draws["noise"] - latents)).square().mean(dim=(1, 2, 3))
        wanted = gradients(wanted_B, adapter.leaves)
        return wanted_B, {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in wanted.items()}

    wanted_B, off = reference(draws["noise"])
    torch.testing.assert_close(loss_B, wanted_B, rtol=1e-5, atol=0)
    assert max(off.values()) < 1e-5, off
    other = reference(1.0001 * draws["noise"])[1]
    assert median(other.values()) > 1e-5, "the control: most show a small error of the model's input"


@of(*FAMILIES)
def test_a_preview_that_begins_at_an_image_shows_it(case: Case) -> None:
    family, text = case.family(), case.sample(case.text(1), 0)
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        mean = case.posterior(pixels).mean
        wanted = VaeImageProcessor().postprocess(case.decoded(mean), output_type="np")[0]
        request = PreviewRequest("a cat", "", 64, 64, 2, 3.5, 1)
        clean_CHW = case.normalised(mean)[0]
        found = denoised(family, case.adapted[1], request, clean_CHW + 1e-4, lambda prompt: text, 1e-4)
    (image,) = decode(family.source, CPU, [found], family.latents, False)
    assert abs(np.asarray(image) / 255 - wanted).max() < 0.02 and wanted.std() > 0


@of(ZImage, Flux, Schnell, Anima)
def test_a_preview_is_that_of_the_pipeline(case: Case) -> None:
    """Its shift is the base's, regardless of training's shift."""
    family, batch = case.family(objective={"shift": 2}), case.text(2)
    model = family.load(torch.float32, CPU)
    texts = {prompt: case.sample(batch, row) for row, prompt in enumerate(TEXTS)}
    noise = torch.randn(CHANNELS, 8, 12, generator=torch.Generator().manual_seed(7))
    request = PreviewRequest(*TEXTS, 96, 64, 3, 4.0, 7)
    with torch.no_grad():
        found = denoised(family, model, request, noise, texts.__getitem__)
        wanted = case.sampled(request, noise, texts)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert family.preview(model, [request], texts.__getitem__)[0].size == (96, 64)


def rounded(name: str, weight_OI: Tensor) -> Tensor:
    """A weight after storage in a format, from the file's numbers in bf16."""
    weight_OI = weight_OI.to(torch.bfloat16)
    scale_O1 = weight_OI.float().abs().amax(1, keepdim=True) / {"int8": 127, "fp8": 448, "nf4": 1}[name]
    scaled_OI = weight_OI.float() / scale_O1
    if name == "int8":
        return (scaled_OI.round() * scale_O1).to(torch.bfloat16)
    if name == "fp8":
        return (scaled_OI.to(torch.float8_e4m3fn).to(torch.bfloat16) * scale_O1).to(torch.bfloat16)
    layer = nn.Linear(weight_OI.shape[1], len(weight_OI), bias=False).requires_grad_(False)
    layer.weight.data = weight_OI
    return dense_weight(quantised(name, "").packed(layer), torch.bfloat16)


def num_bytes(model: nn.Module) -> int:
    """Of parameters and packed weights."""
    buffers = [buffer for layer in model.modules() if is_packed(layer) for buffer in layer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *buffers])


@of(*FAMILIES)
@pytest.mark.parametrize("name", ["int8", "nf4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_packed_text_encoder_encodes_as_its_rounded_weights_do(case: Case, name: str, tmp_path: Path) -> None:
    """The dense one encodes otherwise, by about the rounding of the format (the control): its embeddings are exact."""

    def encoded(**model: Any) -> tuple[str, Tensor]:
        encoder = case.family(model=model).encoders()[-1]
        return encoder.fingerprint, encoder.load(plain_placement(CPU))({CAPTION: "a cat"})[STATES].float()

    component = case.cls.language_model
    folder = Path(shutil.copytree(case.folder / component, tmp_path / component))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    layers = [key for key, tensor in tensors.items() if tensor.ndim == 2 and ".weight" in key and "embed" not in key]
    for key in layers:
        if ("block." in key or "layers." in key) and "bias" not in key:
            tensors[key] = rounded(name, tensors[key])
    save_file(tensors, file)
    packed, dense = encoded(text_encoder_quantization=name), encoded()
    reference = encoded(**{component: str(folder)})
    torch.testing.assert_close(packed[1], reference[1], rtol=1e-4, atol=1e-5)
    assert 0.05 < (packed[1] - dense[1]).norm() / dense[1].norm() / format_errors()[name].weights < 4
    assert packed[0] != dense[0], "the cache has both"
    family = case.family(model={"text_encoder_quantization": name})
    formats = {each: family.weight_format(each).name for each in case.layout.parts}
    assert formats.pop(component) == name and set(formats.values()) == {"dense"}
    (planned,) = packed_encoders(family)
    model = family.source.load(component, torch.bfloat16, CPU, family.weight_format(component))
    assert planned.component == component and planned.weight_bytes == num_bytes(model)
    assert packed_encoders(case.family()) == []


@of(*FAMILIES)
@pytest.mark.parametrize("name", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_check_weighs_what_is_loaded(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, loaded = case.family(model={"text_encoder_quantization": name}), dict[str, int]()
    real = BaseSource.load

    def load(self: BaseSource, component: str, *args: Any) -> nn.Module:
        module = real(self, component, *args)
        loaded[component] = num_bytes(module)
        return module

    monkeypatch.setattr(BaseSource, "load", load)
    for encoder in family.encoders():
        encoder.load(plain_placement(CPU))
    assert loaded.keys() == {*case.layout.parts} - {"transformer"}
    assert weigh(family.recipe).num_bytes == {**loaded, "transformer": num_bytes(case.pipeline.transformer)}


@of(*FAMILIES)
def test_the_presets_name_the_layers_of_the_published_model(case: Case) -> None:
    for preset, count in case.layers.items():
        family = case.family(lora={"targets": preset})
        model = LoadedModel({"transformer": case.full}, torch.float32, CPU)
        chosen = targets(family, model, family.recipe.lora)["transformer"]
        assert len(chosen) == count and "proj_out" not in chosen


@of(*FAMILIES)
def test_the_bundled_configs_are_those_of_the_published_model(case: Case) -> None:
    assert set(case.parameters) == set(case.layout.parts)
    for name, number in case.parameters.items():
        module = case.full if name == "transformer" else case.published.skeleton(name)
        assert sum(p.numel() for key, p in module.named_parameters() if key != "shared.weight") == number, name
        if hasattr(module, "rotary_emb") and name == "text_encoder":
            assert float(1 / module.rotary_emb.inv_freq[1]) == pytest.approx(1e6 ** (2 / 128))


@of(*FAMILIES)
def test_files_of_single_components_are_read_as_a_folder_is(case: Case, tmp_path: Path) -> None:
    def alone(keys: Mapping[str, Any]) -> Any:
        family = case.family({**keys, **{name: str(case.folder / name) for name in case.tokenizers}})
        family.layout = cases.with_configs(family.layout, case.folder)
        return family

    def same(found: Any, names: Any) -> None:
        for name in names:
            tensors = found.source.load(name, torch.float32, CPU).state_dict()
            assert all(torch.equal(tensors[key], tensor) for key, tensor in wanted[name].items()), name

    folder, files = case.family(), {key: {n: t.contiguous() for n, t in f.items()} for key, f in case.files().items()}
    wanted = {name: folder.source.load(name, torch.float32, CPU).state_dict() for name in case.layout.parts}
    state = case.pipeline.transformer.state_dict()
    assert sum(map(torch.numel, case.original(state).values())) == sum(map(torch.numel, state.values()))
    paths = {key: str(tmp_path / f"{key}.safetensors") for key in files}
    for key, tensors in files.items():
        save_file(tensors, paths[key])
    found = alone(paths)
    same(found, case.layout.parts)
    assert found.notices == () and set(map(Path, paths.values())) <= set(found.examine())
    assert found.token_limits() == folder.token_limits()
    for missing in set(paths) - {"name_or_path"}:
        error = refused(alone({key: path for key, path in paths.items() if key != missing}))
        assert error.code == "incomplete-model" and f"model.{missing}" in error.fix
    for prefix in case.prefixes:
        save_file({prefix + name: tensor for name, tensor in files["name_or_path"].items()}, paths["name_or_path"])
        same(alone(paths), case.layout.alone)


def refused(family: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family.source
    return caught.value


@of(*FAMILIES)
def test_other_models_are_refused(case: Case, tmp_path: Path, tiny_sdxl: Path) -> None:
    of_another = refused(case.family(folder=tiny_sdxl))
    assert says(of_another.what, "families/an-sdxl-model") and "set model.family: sdxl" in of_another.fix
    assert refused(case.family({"vae": str(tiny_sdxl / "vae")})).where.startswith("model.vae")
    assert refused(case.family({"name_or_path": str(tmp_path)})).code == "not-a-model"
    other = tmp_path / "other.safetensors"
    save_file({"blocks.0.weight": torch.zeros(2, 2)}, other)
    parts = {name: str(case.folder / name) for name in set(case.layout.parts) - set(case.layout.alone)}
    assert refused(case.family({"name_or_path": str(other), **parts})).code == "wrong-family"


@of(ZImage)
def test_a_wrong_component_is_an_error_with_its_key_and_what_it_is(case: Case, tmp_path: Path) -> None:
    vae, encoder = case.folder / "vae", case.folder / "text_encoder"
    weights = next(vae.glob("*.safetensors"))
    unfit = refused(case.family({"text_encoder": str(weights)}))
    assert (unfit.code, unfit.where) == ("weights-unfit", f"model.text_encoder: {weights}")
    assert says(unfit.what, "families/this-is-a-vae") and says(
        unfit.fix, "families/text-encoder-that-belongs-to-this-model"
    )
    small = shutil.copytree(encoder, tmp_path / "encoder")
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    (small / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))
    wrong = refused(case.family({"text_encoder": str(small)}))
    assert (wrong.code, wrong.where) == ("wrong-family", f"model.text_encoder: {small}")
    right = case.family({"text_encoder": str(encoder), "vae": str(vae), "tokenizer": str(case.folder / "tokenizer")})
    assert not right.notices and right.token_limits(), "the control"
    with pytest.raises(ModelError) as caught:
        case.family({"tokenizer": str(vae)}).token_limits()
    assert (caught.value.code, caught.value.where) == ("tokenizer-unreadable", f"model.tokenizer: {vae}")
    broken = shutil.copytree(case.folder, tmp_path / "broken")
    shutil.copy(weights, next((broken / "text_encoder").glob("*.safetensors")))
    assert refused(case.family(folder=broken)).where == f"model.name_or_path: {broken}"


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "lokr": {"type": "lokr"},
}


def known_to_comfyui(case: Case, state: Mapping[str, Tensor]) -> dict[str, tuple[str, int, int]]:
    """Key of a file -> (the original's weight, its rows): as ComfyUI's map for each model names them."""
    weights = {name: tensor for name, tensor in case.original(state).items() if name.endswith(".weight")}
    whole = {name.removesuffix(".weight"): tensor for name, tensor in weights.items()}
    found = {f"diffusion_model.{name}": (f"{name}.weight", 0, len(tensor)) for name, tensor in whole.items()}
    found |= {f"lora_unet_{name.replace('.', '_')}": found[f"diffusion_model.{name}"] for name in whole}
    pattern = re.compile(case.family().lora_targets["all-linear"]["transformer"])
    layers = {name.removesuffix(".weight") for name in state}
    for original, modules in case.original_modules(filter(pattern.fullmatch, layers)).items():
        first = 0
        for module in modules if not case.native else ():
            rows = len(state[f"{module}.weight"])
            found[case.file_prefix + module] = f"{original}.weight", first, first + rows
            first += rows
    return found


@of(*FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_changes_every_weight_in_comfyui_as_in_training(case: Case, kind: str) -> None:
    """In each spelling that ComfyUI reads; nothing in the file is left over."""
    family = case.family(lora={"rank": 2, "alpha": 1, "targets": "all-linear", **KINDS[kind]})
    _, adapter = case.adapted[1:] if kind == "lora" else adapted(family)
    state = case.pipeline.transformer.state_dict()
    effects = {f"{name.removeprefix('transformer.')}.weight": entry for name, entry in adapter.entries().items()}
    trained = {name: W + effects[name].effect(W) if name in effects else W for name, W in state.items()}
    base, wanted = case.original(state), case.original(trained)
    keys = known_to_comfyui(case, state)
    both = kind != "lokr" and not isinstance(case, ZImage)  # ComfyUI reads nothing with musubi-tuner's names of Z-Image
    for form in ("kohya", "sd-scripts") if both else ("kohya",):
        tensors, found = kohya_tensors(family, adapter, torch.float32, form), {n: W.clone() for n, W in base.items()}
        weights = {key: base[name][first:last] for key, (name, first, last) in keys.items()}
        with adapter.shapes_only():
            hollow = kohya_tensors(family, adapter, torch.float32, form)
        assert {name: tensor.shape for name, tensor in hollow.items()} == {n: t.shape for n, t in tensors.items()}
        for key, patched in apply_comfy(tensors, weights):
            name, first, last = keys[key]
            found[name][first:last] = patched
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
        assert sum(not torch.equal(wanted[name], tensor) for name, tensor in base.items()) == case.changed
        if form == "sd-scripts" and kind != "dora":
            without = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
            key, patched = next(iter(apply_comfy(without, weights)))
            name, first, last = keys[key]
            assert not torch.allclose(patched, wanted[name][first:last], atol=1e-3), "the control"


@of(Flux)
def test_a_dora_of_a_part_of_a_fused_weight_is_refused_by_name(case: Case) -> None:
    """The file would have to give the lengths of the other rows. The other spelling has a key for each layer."""
    family = case.family(lora={"targets": [r"transformer_blocks\.0\.attn\.to_[qv]"], "use_dora": True})
    _, adapter = adapted(family)
    assert kohya_tensors(family, adapter, torch.float32)
    with pytest.raises(AdapterError, match=r"double_blocks_0_img_attn_qkv.*attn\.to_q, transformer.*attn\.to_v"):
        kohya_tensors(family, adapter, torch.float32, "sd-scripts")


@of(*FAMILIES)
def test_every_layer_of_the_published_model_has_its_place_in_the_original(case: Case) -> None:
    family = case.family()
    table = KeyTable({"transformer": case.full}, family.lora_file_names.original)
    pattern = re.compile(family.lora_targets["all-linear"]["transformer"])
    wanted = case.original_modules(name for name, _ in case.full.named_modules() if pattern.fullmatch(name))
    assert sum(map(len, wanted.values())) == case.layers["all-linear"]
    for key, modules in wanted.items():
        found = table.parts[key]
        assert [part.module for part in found] == [f"transformer.{module}" for module in modules]
        ends = [part.at + part.count for part in found]
        assert [part.at for part in found] == [0, *ends[:-1]] and all(part.first == 0 for part in found)


SPELLINGS = {
    "diffusers": ("transformer.", False, "config"),
    "ai-toolkit": ("diffusion_model.", False, "folded"),
    "kohya": ("lora_unet_", True, "kohya"),
    "musubi-tuner": ("lora_unet_", False, "kohya"),
    "ComfyUI": ("diffusion_model.", True, "alpha"),
    "PEFT": ("base_model.model.", True, "alpha"),
    "OneTrainer": ("", True, "alpha"),
    "OneTrainer, its DIFFUSERS": ("transformer.", False, "folded"),
    "OneTrainer, in the past": ("lora_transformer_", False, "kohya"),
    "OneTrainer, in the past, with dots": ("transformer.", False, "kohya"),
    "SimpleTuner": ("lycoris_", False, "kohya"),
    "DiffSynth": ("", False, "default"),
}
"""Program -> (the prefix of a name, whether the name is the original's, the parts of a module)."""
CONFIG = {"format": "pt", "lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 1})}


def fused(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(down, up) of several layers as one: the downs stacked, the ups in blocks along the diagonal."""
    return torch.cat([down for down, _ in parts]), torch.block_diag(*(up for _, up in parts))


def written(case: Case, updates: Mapping[str, tuple[Tensor, Tensor]], spelling: str) -> dict[str, Tensor]:
    """The file of (down, up) by diffusers' names, where the scale is 1/2 and the rank 2."""
    prefix, original, form = SPELLINGS[spelling]
    rows = case.original_modules(updates) if original else {name: [name] for name in updates}
    assert sum(map(len, rows.values())) == len(updates)
    found: dict[str, Tensor] = {}
    for name, parts in rows.items():
        down, up = fused([updates[part] for part in parts])
        start = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
        ends = ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
        if form in ("folded", "default"):
            up = 0.5 * up
        else:
            found |= {f"{start}.alpha": torch.tensor(1.0 * len(parts))} if form != "config" else {}
        more = ".default" if form == "default" else ""
        found |= {f"{start}.{end}{more}.weight": t for end, t in zip(ends, (down, up), strict=True)}
    return found


@of(*FAMILIES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_files_of_other_programs_are_read(case: Case, tmp_path: Path, spelling: str) -> None:
    family, model, adapter = case.adapted
    live = adapter.entries()
    updates = {name.removeprefix("transformer."): (e.down.clone(), e.up.clone()) for name, e in live.items()}
    tensors, metadata = written(case, updates, spelling), CONFIG if spelling == "diffusers" else {}
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, metadata)
    if SPELLINGS[spelling][1] or not case.by_width:
        assert components_of(family, path) == {"transformer"}
    found = read_lora(family, model.components, path)
    assert found.keys() == live.keys()
    for name, entry in live.items():
        torch.testing.assert_close(found[name].update(), entry.update())
    save_file({name.replace("0", "7"): tensor for name, tensor in tensors.items()}, path, metadata)
    with pytest.raises(AdapterError):
        read_lora(family, model.components, path)


@of(ZImage, Flux)
def test_a_pair_of_factors_for_a_whole_fused_weight_is_read(case: Case, tmp_path: Path) -> None:
    """As kohya's scripts train them: query, key and value have one down, and the rows of one up."""
    family, model, adapter = case.adapted
    layers = {name.removeprefix("transformer."): entry for name, entry in adapter.entries().items()}
    rng, tensors, wanted = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    for name, parts in case.original_modules(layers).items():
        rows = [len(layers[part].up) for part in parts]
        down, up = (
            torch.randn(shape, generator=rng) for shape in ((3, layers[parts[0]].down.shape[1]), (sum(rows), 3))
        )
        start = f"lora_unet_{name.replace('.', '_')}"
        tensors |= {f"{start}.lora_down.weight": down, f"{start}.lora_up.weight": up}
        tensors[f"{start}.alpha"] = torch.tensor(1.5)
        wanted |= dict(zip((f"transformer.{part}" for part in parts), (0.5 * up @ down).split(rows), strict=True))
    save_file(tensors, tmp_path / "lora.safetensors")
    found = read_lora(family, model.components, tmp_path / "lora.safetensors")
    assert found.keys() == wanted.keys() and len(tensors) < 3 * len(wanted)
    for name, update in wanted.items():
        torch.testing.assert_close(found[name].update(), update)


ADAPTERS: tuple[Any, ...] = (
    (ZImage, {}),
    (ZImage, {"use_rslora": True}),
    (ZImage, {"type": "lokr"}),
    (ZImage, {"type": "loha"}),
    (ZImage, {"type": "oft"}),
    (ZImage, {"type": "ia3"}),
    (Anima, {"use_dora": True}),
    pytest.param(Anima, {"type": "lokr"}, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("case", "kind"), ADAPTERS, indirect=["case"], ids=str)
def test_every_adapter_is_written_in_every_form_and_loaded_back(
    case: Case, tmp_path: Path, kind: dict[str, Any]
) -> None:
    some = r".*\.1\..*\.to_(q|out\.0)"
    size = {"lora": {"rank": 2, "alpha": 1}, "oft": {"rank": 2}, "ia3": {}}
    family = case.family(lora={"targets": [some], **size.get(kind.get("type", "lora"), size["lora"]), **kind})
    model, adapter = adapted(family)
    for form in family.recipe.exportable:
        path = tmp_path / (form if form == "peft" else f"{form}.safetensors")
        write(form, path, family, adapter, family.recipe, RunFacts(1, 1, 1))
        found = verify(form, path, family, model, adapter)
        assert found.relative_difference < 1e-2
        families = inspect(path)["families"]
        assert case.name in families or not families and isinstance(case, Anima)
        if not isinstance(case, Anima) or form not in ("diffusers", "peft"):  # there only true widths show it
            assert all(said and said <= without_share(found.cannot_read) for said in cannot_read_by_inspect(path))
        if form != "peft" and (form, kind) != ("comfyui", {"use_dora": True}):
            assert form in ("sd-scripts", "comfyui") or "kohya's tools" in str(found.cannot_read) or kind.get("type")
            entries = read_lora(family, model.components, path)
            assert entries.keys() == adapter.entries().keys()
            for name, entry in adapter.entries().items():
                weight = adapter.modules[name][2].get_base_layer().weight.detach()
                wanted = entry.additive().effect(weight)
                assert (wanted - entries[name].additive().effect(weight)).norm() < 1e-2 * wanted.norm()
