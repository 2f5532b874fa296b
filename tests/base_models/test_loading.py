"""Folders, one-file checkpoints, the package's own model, a separate VAE: all read alike, and refused with a reason."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file

from lora_rocm.base_models import loading
from lora_rocm.base_models import meta_components as room
from lora_rocm.base_models.loading import BaseSource
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import ModelError
from lora_rocm.families.common.unet import detect
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.registry import FAMILIES
from lora_rocm.families.sdxl.family import EXPECTED, LAYOUT, Sdxl
from lora_rocm.rundir.layout import RunDir
from tests.tiny_models import (
    caption_encoder,
    tiny_pipeline,
    tiny_recipe,
    write_config_folder,
    write_hollow_sdxl,
    write_single_file,
    write_tiny_sdxl,
)
from tests.wording import says

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionXLPipeline:
    return tiny_pipeline()


@pytest.fixture(scope="module")
def written(pipeline: StableDiffusionXLPipeline, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(one-file checkpoint, folder with its configs and tokenizers), which no test changes."""
    folder = tmp_path_factory.mktemp("written")
    file = write_single_file(pipeline, folder / "a checkpoint.safetensors")
    return file, write_config_folder(pipeline, folder / "config")


@pytest.fixture
def single(written: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of both."""
    return Path(shutil.copy(written[0], tmp_path)), Path(shutil.copytree(written[1], tmp_path / "config"))


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-file checkpoint of the full size."""
    return write_hollow_sdxl(tmp_path_factory.mktemp("hollow") / "x.safetensors")


def family(path: Path, **model: Any) -> Sdxl:
    return Sdxl(tiny_recipe(path, model=model))


def refused(path: Path, **model: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family(path, **model).source
    return caught.value


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("component", list(LAYOUT.parts))
def test_a_one_file_checkpoint_gives_the_same_weights(
    single: tuple[Path, Path], pipeline: StableDiffusionXLPipeline, component: str
) -> None:
    source = family(single[0], config=str(single[1])).source
    loaded = source.load(component, torch.float32, CPU)
    assert same_weights(loaded, getattr(pipeline, component))
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("component", list(LAYOUT.parts))
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_folder_gives_the_same_weights(
    tmp_path: Path, pipeline: StableDiffusionXLPipeline, component: str, variant: str | None
) -> None:
    folder = write_tiny_sdxl(tmp_path / "m", variant=variant)
    loaded = family(folder).source.load(component, torch.float32, CPU)
    assert same_weights(loaded, getattr(pipeline, component))


def test_loaded_weights_are_no_mapping(tmp_path: Path) -> None:
    folder = write_tiny_sdxl(tmp_path / "m")
    source = family(folder).source
    loaded = [source.load(component, torch.float32, CPU) for component in ("unet", "text_encoder")]
    before = [p.clone() for module in loaded for p in module.parameters()]
    for path in folder.glob("*/*.safetensors"):
        with path.open("r+b") as handle:
            handle.write(b"\0" * path.stat().st_size)
    after = [p for module in loaded for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_weights_in_several_files(tmp_path: Path, pipeline: StableDiffusionXLPipeline) -> None:
    folder = write_tiny_sdxl(tmp_path / "m")
    unet = pipeline.unet
    shutil.rmtree(folder / "unet")
    unet.save_pretrained(folder / "unet", max_shard_size="1MB")
    assert len(list((folder / "unet").glob("*.safetensors"))) > 2
    source = family(folder).source
    assert same_weights(source.load("unet", torch.float32, CPU), unet)
    assert source.fingerprint("unet")
    lost = sorted((folder / "unet").glob("*.safetensors"))[1]
    lost.unlink()
    error = refused(folder)
    assert (error.where, "missing" in error.what) == (str(lost), True) and says(
        error.fix, "base_models/download-this-file-again"
    )


def test_the_same_loss_from_folder_and_file(single: tuple[Path, Path], tiny_sdxl: Path) -> None:
    def loss(chosen: Sdxl) -> list[float]:
        batch = {"latent_mean": torch.ones(1, 4, 8, 8), "latent_std": torch.ones(1, 4, 8, 8)}
        batch |= {name: tensor[None] for name, tensor in caption_encoder(chosen)("a red cat").items()}
        batch |= {"time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]])}
        model = chosen.load(torch.float32, CPU)
        return losses(chosen, model, batch, chosen.objective.draw(batch, [5]).tensors).tolist()

    assert loss(family(single[0], config=str(single[1]))) == pytest.approx(loss(family(tiny_sdxl)), rel=1e-5)


def test_a_one_file_checkpoint_says_how_it_predicts(tmp_path: Path, pipeline: StableDiffusionXLPipeline) -> None:
    marks = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    file = write_single_file(pipeline, tmp_path / "v.safetensors", marks)
    chosen = family(file, config=str(write_config_folder(pipeline, tmp_path / "c")))
    assert chosen.objective.schedule.prediction_type == "v_prediction"
    assert chosen.objective.schedule.alphas_cumprod_T[-1] == 0


def test_without_tokenizers_the_remedy_is_named(single: tuple[Path, Path], hollow: Path) -> None:
    whole = family(hollow)  # the packaged ones, without a network
    assert [limit.max_tokens for limit in whole.token_limits()] == [227, 227]
    shutil.rmtree(single[1] / "tokenizer_2")
    with pytest.raises(ModelError) as caught:
        family(single[0], config=str(single[1])).encoders()[2].load(plain_placement(CPU))
    assert caught.value.code == "tokenizer-missing" and "model.config" in caught.value.fix


@pytest.mark.parametrize("form", ["folder", "model folder", "file", "original file"])
def test_a_separate_vae(tmp_path: Path, tiny_sdxl: Path, form: str) -> None:
    other = write_tiny_sdxl(tmp_path / "other", seed=1)
    vae: Path = {"folder": other / "vae", "model folder": other}.get(form, tmp_path / "vae.safetensors")
    expected = load_file(other / "vae" / "diffusion_pytorch_model.safetensors")
    if form == "file":
        save_file(expected, vae)
    if form == "original file":
        whole = load_file(write_single_file(tiny_pipeline(1), tmp_path / "all.safetensors"))
        save_file({k: v for k, v in whole.items() if k.startswith("first_stage_model.")}, vae)
    loaded = family(tiny_sdxl, vae=str(vae)).source.load("vae", torch.float32, CPU).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_vae_of_another_family_is_refused(tmp_path: Path, tiny_sdxl: Path) -> None:
    for number, changes in enumerate(({"latent_channels": 16}, {"scaling_factor": 0.18215})):
        other = write_tiny_sdxl(tmp_path / str(number), vae=changes)
        assert refused(tiny_sdxl, vae=str(other / "vae")).code == "wrong-family"
    assert refused(tiny_sdxl, vae=str(tmp_path / "none")).code == "model-missing"


def test_the_model_that_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tiny_sdxl(tmp_path / "tiny_sdxl")
    monkeypatch.setattr(loading.resources, "files", lambda package: tmp_path)
    assert family(Path("builtin:tiny-sdxl")).source.folder == tmp_path / "tiny_sdxl"
    error = refused(Path("builtin:other"))
    assert error.code == "model-missing" and "builtin:tiny-sdxl" in error.fix


def test_damage_is_noticed_before_loading(tmp_path: Path, single: tuple[Path, Path]) -> None:
    folder = write_tiny_sdxl(tmp_path / "m")
    for path in (folder / "unet" / "diffusion_pytorch_model.safetensors", single[0]):
        path.write_bytes(path.read_bytes()[:-10])
    assert refused(folder).code == "weights-damaged"
    assert refused(single[0], config=str(single[1])).code == "weights-damaged"


def test_weights_of_another_shape_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    folder = write_tiny_sdxl(tmp_path / "m")
    for component, key in (("unet", "conv_in.weight"), ("vae", "quant_conv.weight"), ("text_encoder", None)):
        path = next((folder / component).glob("*.safetensors"))
        tensors = load_file(path)
        tensors.pop(key or min(tensors))
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(ModelError) as caught:
            family(folder).source.load(component, torch.float32, CPU)
        assert caught.value.code == "weights-unfit"
        assert "missing" in caught.value.what


@pytest.mark.parametrize(("lost", "each"), [
    ("model.diffusion_model.middle_block.1.proj_in.weight", 1),
    ("model.diffusion_model.middle_block.1.", 1),
    ("model.diffusion_model.label_emb.0.0.weight", 1),
    ("model.diffusion_model.output_blocks.5.", 1),
    ("first_stage_model.decoder.mid.", 1),
    ("conditioner.embedders.0.transformer.text_model.encoder.layers.1.", 1),
    ("conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight", 3),  # query, key and value
    ("conditioner.embedders.1.model.text_projection", 1),
])  # fmt: skip
def test_a_checkpoint_that_lacks_tensors_is_refused_by_its_header(
    single: tuple[Path, Path], lost: str, each: int
) -> None:
    whole = load_file(single[0])
    tensors = {name: tensor for name, tensor in whole.items() if not name.startswith(lost)}
    count = each * (len(whole) - len(tensors))
    save_file(tensors, single[0])
    error = refused(single[0], config=str(single[1]))
    assert error.code == "weights-unfit"
    said = re.search(r"(\d+) tensors? (?:is|are) missing, for example ", error.what)
    assert said and int(said.group(1)) >= count  # names behind a hole in the numbers are not found either


def test_what_looking_refuses_loading_refuses(single: tuple[Path, Path]) -> None:
    unread = replace(family(single[0], config=str(single[1])).source)
    tensors = load_file(single[0])
    del tensors["model.diffusion_model.middle_block.1.proj_in.weight"]
    save_file(tensors, single[0])
    with pytest.raises(ModelError, match="1 tensor is missing, for example mid_block.attentions.0.proj_in.weight"):
        unread.load("unet", torch.float32, CPU)


def test_a_vae_with_more_channels_is_told_by_its_shapes(tmp_path: Path) -> None:
    folder = write_tiny_sdxl(tmp_path / "m")
    other = tiny_pipeline(vae={"latent_channels": 16}).vae.state_dict()
    save_file(other, folder / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    error = refused(folder)
    assert error.code == "weights-unfit"
    assert says(error.what, "base_models/of-another-shape") and "not (" in error.what


@pytest.mark.parametrize("component", list(LAYOUT.parts))
def test_looking_knows_from_which_tensors_each_is_made(single: tuple[Path, Path], component: str) -> None:
    """Every tensor of the component comes from tensors under its prefix, and each of these is used."""
    source = family(single[0], config=str(single[1])).source
    found, (_, prefix) = source.predict_loading(component), source.weights(component)
    assert found.unread == ()
    used = set().union(*found.made_of.values())
    assert found.made_of.keys() == source.load(component, torch.float32, CPU).state_dict().keys()
    assert all(found.made_of.values())
    assert used == {name for name in source.single_header.tensors if name.startswith(prefix)}  # type: ignore[union-attr]


def test_full_size_is_looked_at_in_a_moment(hollow: Path) -> None:
    source = BaseSource("x", LAYOUT, LAYOUT.configs, None, hollow)
    assert detect.check(source, EXPECTED, FAMILIES) == ()


def test_names_of_old_libraries(tmp_path: Path, pipeline: StableDiffusionXLPipeline) -> None:
    """Of the VAE's attention, as diffusers 0.18 saved it, and of the text encoder, as transformers 4 did."""
    folder = write_tiny_sdxl(tmp_path / "m")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors, renamed = load_file(path), 0
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        for name in [name for name in tensors if f".{new}." in name]:
            tensors[name.replace(f".{new}.", f".{old}.")] = tensors.pop(name)
            renamed += 1
    assert renamed == 16
    save_file(tensors, path, {"format": "pt"})
    path = folder / "text_encoder" / "model.safetensors"
    old = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in load_file(path).items()}
    old["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(old, path, {"format": "pt"})
    source = family(folder).source
    for component in ("vae", "text_encoder"):
        assert same_weights(source.load(component, torch.float32, CPU), getattr(pipeline, component))


@pytest.mark.parametrize("component", ["unet", "vae", "text_encoder", "text_encoder_2"])
def test_a_component_is_what_the_libraries_load(tiny_sdxl: Path, component: str) -> None:
    """Weights, buffers, the mode, and the config fields that affect the computation."""
    part = LAYOUT.parts[component]
    theirs = part.cls.from_pretrained(str(tiny_sdxl / component), local_files_only=True).eval()
    ours = family(tiny_sdxl).source.load(component, torch.float32, CPU)
    buffers = dict(ours.named_buffers())
    assert buffers.keys() == dict(theirs.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in theirs.named_buffers())
    assert same_weights(ours, theirs)
    assert not any(module.training for module in ours.modules())
    attention = "_attn_implementation"
    assert getattr(ours.config, attention, None) == getattr(theirs.config, attention, None)


@pytest.mark.parametrize("suffix", [".ckpt", ".bin", ".pt", ".pth"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, tiny_sdxl: Path, suffix: str) -> None:
    pickle = tmp_path / f"model{suffix}"
    torch.save({"a": torch.zeros(1)}, pickle)
    for error in (refused(pickle), refused(tiny_sdxl, vae=str(pickle)), refused(tmp_path)):
        assert error.code == "pickle-refused"
        assert "any program" in error.what


def test_a_folder_with_pickles_only_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_sdxl(tmp_path / "m")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    assert family(folder).source
    weights.unlink()
    assert refused(folder).code == "pickle-refused"


def test_what_is_not_there(tmp_path: Path, tiny_sdxl: Path) -> None:
    assert refused(tmp_path / "none").code == "model-missing"
    assert refused(tmp_path).code == "not-a-model"
    text = tmp_path / "notes.txt"
    text.write_text("x", encoding="utf-8")
    assert refused(text).code == "not-a-model"
    folder = tmp_path / "m"
    shutil.copytree(tiny_sdxl, folder)
    (folder / "unet" / "config.json").write_text("{", encoding="utf-8")
    assert refused(folder).code == "config-unreadable"
    (folder / "unet" / "config.json").unlink()
    assert refused(folder).code == "config-missing"


def test_a_folder_around_a_checkpoint_is_pointed_into(single: tuple[Path, Path]) -> None:
    error = refused(single[0].parent)
    assert error.code == "not-a-model"
    assert single[0].name in error.fix


def test_a_run_directory_is_no_base(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    run_dir.lora.touch()
    assert refused(run_dir.path).code == "not-a-model", "the control: a folder with a file of that name alone"
    run_dir.events().touch()
    error = refused(run_dir.path)
    assert error.code == "base-is-run" and "run directory" in error.what
    assert str(run_dir.recipe) in error.fix and f"lora.init_from: {run_dir.lora}" in error.fix


def test_a_component_is_made_once_and_each_that_is_loaded_is_a_copy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made = family(write_tiny_sdxl(tmp_path / "model")).source, list[object]()
    make = room.new_meta_component
    monkeypatch.setattr(room, "shared_meta_component", lambda *key: made.append(key) or make(*key))
    room._meta_component_bytes.cache_clear()
    first, second = (source.load("unet", torch.float32, torch.device("cpu")) for _ in range(2))
    assert len(made) == 1 and second is not first
    assert not {id(each) for each in first.parameters()} & {id(each) for each in second.parameters()}
    assert not any(parameter.is_meta for parameter in (*first.parameters(), *second.parameters()))
