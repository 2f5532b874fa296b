"""Stable Diffusion 1.x and 2.x: loss and gradients, captions, files and previews against diffusers itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import ModelError
from lora_rocm.families.base import PreviewRequest, family_for
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.sd.family import LAYOUT_SD2, LAYOUT_SD15, TELLING_BIAS, Sd2, Sd15
from tests.tiny_models import SHALLOW, drawn_by, scheduler_config, tiny_recipe, write_tiny_sdxl
from tests.tiny_sd import SHALLOW_SD, WIDTH, Version, tiny_sd, write_sd_configs, write_single_sd, write_tiny_sd

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
CPU = torch.device("cpu")
SEEDS = [3, 2**63 - 1]
VERSIONS: tuple[Version, ...] = ("sd15", "sd2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("kleine Modelle")
    return {version: write_tiny_sd(base / version, version) for version in VERSIONS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each version (one-file checkpoint, folder with its configs and tokenizer), which no test changes."""
    base, found = tmp_path_factory.mktemp("einzelne Dateien"), {}
    for version in VERSIONS:
        pipeline = tiny_sd(version)
        path = write_single_sd(pipeline, version, base / f"ein Modell {version}.safetensors")
        found[version] = path, write_sd_configs(pipeline, base / f"configs {version}")
    return found


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With fewer levels and layers."""
    base = tmp_path_factory.mktemp("flach")
    return {version: write_tiny_sd(base / version, version, SHALLOW_SD) for version in VERSIONS}


def family_of(version: str, folder: Path, **sections: dict[str, Any]) -> Any:
    sections["model"] = {"family": version, **sections.get("model", {})}
    return family_for(tiny_recipe(folder, **sections))


def batch_of(rows: int = 2) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        "latent_mean": torch.randn(rows, 4, 8, 8, generator=rng),
        "latent_std": torch.rand(rows, 4, 8, 8, generator=rng),
        "prompt_embeds": torch.randn(rows, 77, WIDTH, generator=rng),
    }


@pytest.mark.parametrize(("version", "prediction"), [
    pytest.param(version, prediction, marks=() if (version == VERSIONS[0]) is (prediction == "epsilon")
                 else pytest.mark.slow)
    for version in VERSIONS for prediction in ("epsilon", "v_prediction")
])  # fmt: skip
def test_loss_and_gradients_are_the_reference(shallow: dict[str, Path], version: str, prediction: str) -> None:
    """As diffusers' own training script computes them."""
    family = family_of(version, shallow[version], model={"prediction_type": prediction})
    model = family.load(torch.float32, CPU)
    model.components["unet"].requires_grad_(True)
    family.fuse(model)
    batch = batch_of()
    draws = family.objective.draw(batch, SEEDS).tensors
    loss_B = losses(family, model, batch, draws)
    unet = UNet2DConditionModel.from_pretrained(shallow[version], subfolder="unet", use_safetensors=True)
    config = {k: v for k, v in scheduler_config().items() if k not in ("timestep_spacing", "prediction_type")}
    scheduler = DDPMScheduler(**config, prediction_type=prediction)
    latents = (batch["latent_mean"] + batch["latent_std"] * draws["posterior"]) * 0.18215
    noise, timesteps = draws["noise"], draws["timesteps"]
    predicted = unet(scheduler.add_noise(latents, noise, timesteps), timesteps, batch["prompt_embeds"]).sample
    targets = {"epsilon": noise, "v_prediction": scheduler.get_velocity(latents, noise, timesteps)}
    expected_B = (predicted - targets[prediction]).square().mean(dim=(1, 2, 3))
    other_B = (predicted - next(t for name, t in targets.items() if name != prediction)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(loss_B, other_B, rtol=1e-2)  # negative control
    loss_B.sum().backward()
    expected_B.sum().backward()
    gradients = {name: p.grad for name, p in model.components["unet"].named_parameters()}
    for name, parameter in unet.named_parameters():
        # a GroupNorm removes constants, so gradients of the biases before it cancel: 1.2e-5 was seen
        limit = 1e-5 if parameter.ndim > 1 else 5e-5
        assert float((gradients[name] - parameter.grad).norm() / parameter.grad.norm()) < limit, name


@pytest.mark.parametrize("version", VERSIONS)
def test_captions_are_encoded_as_by_the_pipeline(shallow: dict[str, Path], version: str) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(shallow[version], local_files_only=True)
    expected_BSD, _ = pipeline.encode_prompt("a red cat", CPU, 1, False)
    family = family_of(version, shallow[version])
    encoded = family.encoders()[1].load(plain_placement(CPU))({CAPTION: "a red cat"})
    assert {name: spec.dims for name, spec in family.encoders()[1].entry.tensors.items()} == {"prompt_embeds": "SD"}
    torch.testing.assert_close(encoded["prompt_embeds"], expected_BSD[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_trained_text_encoders_read_tokens_and_get_gradients(shallow: dict[str, Path], version: str) -> None:
    family = family_of(version, shallow[version], lora={"train_text_encoder": True})
    model = family.load(torch.float32, CPU)
    assert model.components.keys() == {"unet", "text_encoder"}
    for component in model.components.values():
        component.requires_grad_(True)
    batch = batch_of(1)
    caption, frozen = {CAPTION: "a red cat"}, family_of(version, shallow[version])
    batch["prompt_embeds"] = frozen.encoders()[1].load(plain_placement(CPU))(caption)["prompt_embeds"][None]
    draws = family.objective.draw(batch, [1]).tensors
    expected_B = losses(family, model, batch, draws)
    del batch["prompt_embeds"]
    batch |= {name: ids[None] for name, ids in family.encoders()[1].load(plain_placement(CPU))(caption).items()}
    loss_B = losses(family, model, batch, draws)
    torch.testing.assert_close(loss_B, expected_B)
    loss_B.sum().backward()
    grads = [p.grad for p in model.components["text_encoder"].parameters()]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads)
    assert set(family.example(SampleShape.of(h=64, w=64), 2)) == {"latent_mean", "latent_std", "input_ids"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_single_file_is_its_folder(
    folders: dict[str, Path], files: dict[str, tuple[Path, Path]], version: Version
) -> None:
    path, configs = files[version]
    one = family_of(version, path, model={"config": str(configs)})
    many = family_of(version, folders[version])
    assert one.notices == ()
    for component in many.all_components:
        theirs = many.source.load(component, torch.float32, CPU).state_dict()
        ours = one.source.load(component, torch.float32, CPU).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert one.base_facts()["hash"] and not many.base_facts()["hash"]


@pytest.mark.parametrize("spread", [0.01, 0.5])
def test_what_a_single_file_of_2_x_predicts_is_told_by_its_weights(
    files: dict[str, tuple[Path, Path]], spread: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, configs = files["sd2"]
    path = tmp_path / "x.safetensors"
    save_file({**load_file(file), TELLING_BIAS: torch.linspace(-spread, spread, 16)}, path)
    told = family_of("sd2", path, model={"config": str(configs)})
    assert told.base_facts()["prediction_type"] == "epsilon"  # by the config that was given
    monkeypatch.setattr(Sd2, "layout", replace(LAYOUT_SD2, configs=configs))
    family = family_of("sd2", path)
    assert family.scheduler_config["prediction_type"] == ("v_prediction" if spread > 0.1 else "epsilon")
    chosen = family_of("sd2", path, model={"prediction_type": "epsilon"})
    assert chosen.scheduler_config["prediction_type"] == "epsilon"  # the user may state it


def test_other_families_are_recognised_by_name(
    folders: dict[str, Path], files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    sdxl = write_tiny_sdxl(tmp_path / "sdxl", **SHALLOW)
    wide = write_tiny_sd(tmp_path / "wide", unet=SHALLOW_SD | {"cross_attention_dim": 1024})
    paint = write_tiny_sd(tmp_path / "paint", unet=SHALLOW_SD | {"in_channels": 8})
    cases = [
        ("sd15", sdxl, "an SDXL model"),
        ("sd2", sdxl, "an SDXL model"),
        ("sd15", files["sd2"][0], "a Stable Diffusion 2.x model"),
        ("sd2", files["sd15"][0], "a Stable Diffusion 1.x model"),
        ("sdxl", files["sd15"][0], "a Stable Diffusion 1.x model"),
        ("sdxl", files["sd2"][0], "a Stable Diffusion 2.x model"),
        ("sdxl", folders["sd15"], "a Stable Diffusion 1.x or 2.x model"),
        ("sd15", wide, "a Stable Diffusion 2.x UNet"),
        ("sd15", paint, "8 input channels"),
    ]
    for version, path, what in cases:
        with pytest.raises(ModelError) as caught:
            family_of(version, path).examine()
        assert caught.value.code == "wrong-family" and what in str(caught.value), (version, path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_preview_is_the_pipeline_s_image(shallow: dict[str, Path], version: str, guidance: float) -> None:
    request = PreviewRequest("a red cat", "dog", 64, 48, 2, guidance, 7)
    family = family_of(version, shallow[version])
    model = family.load(torch.float32, CPU)
    encode = family.encoders()[1].load(plain_placement(CPU))
    (ours,) = family.preview(model, [request], lambda prompt: encode({CAPTION: prompt}))
    pipeline = StableDiffusionPipeline.from_pretrained(shallow[version], local_files_only=True)
    theirs = drawn_by(pipeline, request)
    assert ours.size == (64, 48)
    assert abs(np.asarray(ours).astype(int) - np.asarray(theirs).astype(int)).max() <= 1


def test_published_configs_have_the_published_sizes() -> None:
    counts = {}
    for layout in (LAYOUT_SD15, LAYOUT_SD2):
        source = BaseSource("published", layout, layout.configs, None)
        for part in layout.parts:
            counts[layout.configs.name, part] = sum(p.numel() for p in source.skeleton(part).parameters())
    assert counts["config_sd15", "unet"] == 859_520_964 and counts["config_sd2", "unet"] == 865_910_724
    assert counts["config_sd15", "text_encoder"] == 123_060_480 and counts["config_sd2", "text_encoder"] == 340_387_840
    assert counts["config_sd15", "vae"] == counts["config_sd2", "vae"] == 83_653_863


def test_module_names_are_those_of_kohya() -> None:
    family = Sd15(tiny_recipe("any", model={"family": "sd15"}))
    module = "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_out.0"
    expected = "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_out_0"
    assert family.lora_file_names.key("unet", module) == expected
    for path in ("encoder.layers.0.mlp.fc1", "text_model.encoder.layers.0.mlp.fc1"):
        assert family.lora_file_names.key("text_encoder", path) == "lora_te_text_model_encoder_layers_0_mlp_fc1"
