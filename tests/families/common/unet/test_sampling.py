"""Previews equal the pipeline's own images, and leave the model unchanged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
)
from PIL import Image

from lora_rocm.families.base import PreviewRequest
from lora_rocm.families.common import vae as vae_module
from lora_rocm.families.common.unet import sampling
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.recipe.sections import Sampler
from tests.tiny_models import SHALLOW_WIDER, caption_encoder, drawn_by, tiny_recipe, write_tiny_sdxl

# NumPy 2 deprecates the call by which diffusers passes a tensor
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

CPU = torch.device("cpu")
REQUEST = PreviewRequest("a red cat", "", 64, 48, 3, 4.0, 7)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def draw(folder: Path, requests: list[PreviewRequest], dtype: torch.dtype = torch.float32, **sections: dict) -> list:
    family = Sdxl(tiny_recipe(folder, **sections))
    return family.preview(family.load(dtype, CPU), requests, caption_encoder(family))


SCHEDULERS = {
    "euler": EulerDiscreteScheduler,
    "euler_a": EulerAncestralDiscreteScheduler,
    "heun": HeunDiscreteScheduler,
    "dpmpp_2m": DPMSolverMultistepScheduler,
    "dpmpp_2m_karras": partial(DPMSolverMultistepScheduler.from_config, use_karras_sigmas=True),
    "ddim": DDIMScheduler,
    "ddpm": DDPMScheduler,
    "unipc": UniPCMultistepScheduler,
}
"""diffusers' name for each sampler, written down apart from the table of the program."""


@pytest.mark.parametrize("sampler", get_args(Sampler))
def test_a_preview_is_the_pipeline_s_image(tiny_sdxl: Path, sampler: str) -> None:
    guidance, negative = {"euler": (1.0, ""), "euler_a": (4.0, "dog"), "ddim": (1.0, "dog")}.get(sampler, (4.0, ""))
    request = replace(REQUEST, guidance_scale=guidance, negative_prompt=negative, sampler=sampler)
    (ours,) = draw(tiny_sdxl, [request])
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, local_files_only=True)
    made = SCHEDULERS[sampler]
    pipeline.scheduler = getattr(made, "from_config", made)(pipeline.scheduler.config)
    theirs = drawn_by(pipeline, request)
    assert ours.size == (64, 48)
    assert abs(pixels(ours) - pixels(theirs)).max() <= 1


def test_seeds_prompts_and_batches(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image depends on its own request, not on the other images of its batch."""
    requests = [REQUEST, replace(REQUEST, seed=8), replace(REQUEST, prompt="dog"), replace(REQUEST, width=80), REQUEST]
    together = [pixels(image) for image in draw(tiny_sdxl, requests)]
    assert abs(together[0] - together[4]).max() <= 1
    assert all(abs(together[0] - together[i]).max() > 3 for i in (1, 2))
    assert together[3].shape == (48, 80, 3)
    monkeypatch.setattr(sampling, "BATCH_PIXELS", 1)
    alone = [pixels(image) for image in draw(tiny_sdxl, requests)]
    assert all(abs(a - b).max() <= 1 for a, b in zip(together, alone, strict=True))


def test_prompts_of_several_lengths_are_drawn_together_as_alone(
    tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, longest = "cat dog " * 60, "cat dog " * 100
    requests = [REQUEST, replace(REQUEST, prompt=long), replace(REQUEST, negative_prompt=longest)]
    together = [pixels(image) for image in draw(tiny_sdxl, requests)]
    monkeypatch.setattr(sampling, "BATCH_PIXELS", 1)
    alone = [pixels(image) for image in draw(tiny_sdxl, requests)]
    assert all(abs(a - b).max() <= 1 for a, b in zip(together, alone, strict=True))
    (cut,) = draw(tiny_sdxl, requests[1:2], model={"max_token_length": 75})
    assert abs(pixels(cut) - together[1]).max() > 1


def test_v_prediction_and_zero_terminal_snr_are_respected(tmp_path: Path) -> None:
    folder = write_tiny_sdxl(tmp_path / "m", **SHALLOW_WIDER)
    plain = pixels(draw(folder, [REQUEST])[0])
    velocity = pixels(draw(folder, [REQUEST], model={"prediction_type": "v_prediction"})[0])
    zero = draw(folder, [REQUEST], model={"prediction_type": "v_prediction"}, objective={"zero_terminal_snr": True})[0]
    assert abs(plain - velocity).max() > 3
    assert abs(pixels(zero) - velocity).max() > 3


def test_other_latent_statistics_are_undone(tmp_path: Path) -> None:
    statistics = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 3.0, 4.0]}
    folder = write_tiny_sdxl(tmp_path / "m", unet=SHALLOW_WIDER["unet"], vae=SHALLOW_WIDER["vae"] | statistics)
    (ours,) = draw(folder, [REQUEST])
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True)
    theirs = pipeline(
        REQUEST.prompt,
        negative_prompt="",
        height=48,
        width=64,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert abs(pixels(ours) - pixels(theirs)).max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_draw(tiny_sdxl: Path, dtype: torch.dtype) -> None:
    (exact,), (rounded,) = draw(tiny_sdxl, [REQUEST]), draw(tiny_sdxl, [REQUEST], dtype)
    assert np.abs(pixels(exact) - pixels(rounded)).mean() < 8


def test_the_model_is_left_as_it_was(tiny_sdxl: Path) -> None:
    family = Sdxl(tiny_recipe(tiny_sdxl))
    model = family.load(torch.float32, CPU)
    family.recompute_activations(model)
    unet = model.components["unet"].train()
    unet.conv_in.eval()
    before = {name: module.training for name, module in unet.named_modules()}
    family.preview(model, [REQUEST], caption_encoder(family))
    assert {name: module.training for name, module in unet.named_modules()} == before
    assert set(before.values()) == {True, False}


def test_trained_text_encoders_speak_for_themselves(tiny_sdxl: Path) -> None:
    lora = {"train_text_encoder": True}
    family = Sdxl(tiny_recipe(tiny_sdxl, lora=lora))
    model = family.load(torch.float32, CPU)
    tokens = caption_encoder(family)
    (before,) = family.preview(model, [REQUEST], tokens)
    assert abs(pixels(before) - pixels(draw(tiny_sdxl, [REQUEST])[0])).max() <= 1
    with torch.no_grad():
        for parameter in model.components["text_encoder"].encoder.layers[0].parameters():
            parameter.mul_(3.0)
    (after,) = family.preview(model, [REQUEST], tokens)
    assert abs(pixels(before) - pixels(after)).max() > 1


def test_large_images_are_decoded_in_tiles(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(REQUEST, width=128, height=128)
    (whole,) = draw(tiny_sdxl, [request])
    monkeypatch.setattr(vae_module, "TILING_PIXELS", 128 * 128 - 1)
    (tiled,) = draw(tiny_sdxl, [request])
    assert tiled.size == whole.size
    assert abs(pixels(whole) - pixels(tiled)).max() > 0


def test_small_tiles_are_asked_for_where_memory_is_short(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_module, "SMALL_TILE_PX", 64)
    request = replace(REQUEST, width=128, height=128)
    family = Sdxl(tiny_recipe(tiny_sdxl))
    model, text = family.load(torch.float32, CPU), caption_encoder(family)
    largest: list[int] = []
    decoder = AutoencoderKL.decode

    def watched(self: AutoencoderKL, latents: torch.Tensor, return_dict: bool) -> object:
        self.decoder.register_forward_hook(lambda module, args, out: largest.append(max(args[0].shape[2:])))
        return decoder(self, latents, return_dict=return_dict)

    monkeypatch.setattr(AutoencoderKL, "decode", watched)
    (whole,), (tiled,) = (family.preview(model, [request], text, in_tiles) for in_tiles in (False, True))
    assert largest[0] == 16 and set(largest[1:]) <= {2, 4, 6, 8} and len(largest) > 4
    assert whole.size == tiled.size and abs(pixels(whole) - pixels(tiled)).max() > 0


def test_images_are_decoded_with_the_attention_of_the_vae(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(vae_module, "plain_attention", lambda device: entered.append(device) or nullcontext())
    draw(tiny_sdxl, [REQUEST])
    assert entered == [CPU]
