"""Samples preview images from the live model with the family's diffusers pipeline and a diffusers sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers import (
    ConfigMixin,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from PIL import Image
from torch import Tensor, nn

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.families.base import LoadedModel, PreviewRequest
from lora_rocm.families.common.recompute import evaluating
from lora_rocm.families.common.unet import inpainting
from lora_rocm.families.common.vae import decode, encode, pixels_per_latent
from lora_rocm.families.objectives.base import LatentSpace

BATCH_PIXELS = 1024 * 1024  # total area of a batch of images of one size

SAMPLERS: Mapping[str, tuple[type[ConfigMixin], Mapping[str, bool]]] = {
    "euler": (EulerDiscreteScheduler, {}),
    "euler_a": (EulerAncestralDiscreteScheduler, {}),
    "heun": (HeunDiscreteScheduler, {}),
    "dpmpp_2m": (DPMSolverMultistepScheduler, {}),
    "dpmpp_2m_karras": (DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    "ddim": (DDIMScheduler, {}),
    "ddpm": (DDPMScheduler, {}),
    "unipc": (UniPCMultistepScheduler, {}),
}
"""Scheduler class of diffusers and its options, by the value of ``sample.sampler``."""
Embeddings = Callable[[str], dict[str, Tensor]]
"""Maps a prompt to arguments of the pipeline ("prompt_embeds", ...) with B = 1, on the model's device."""
MakePipeline = Callable[[nn.Module, Any], Any]
"""Maps (UNet, scheduler) to a pipeline of only these two. It takes embedded prompts and returns latents."""


@torch.no_grad()
def sample_images(
    source: BaseSource,
    scheduler_config: Mapping[str, Any],
    model: LoadedModel,
    requests: Sequence[PreviewRequest],
    make_pipeline: MakePipeline,
    embeddings: Embeddings,
    space: LatentSpace,
    in_tiles: bool = False,
) -> list[Image.Image]:
    """Sample an image for every request, in the order of the requests.

    The initial noise comes from a CPU generator seeded per request, so an image is the same on every device up to
    rounding. The float32 VAE is loaded after denoising and freed at the end.

    Args:
        source: the base with the VAE.
        scheduler_config: the base's scheduler config, with prediction_type and rescale_betas_zero_snr resolved.
        model: the live model, which is left unchanged.
        requests: the images to sample.
        make_pipeline: the family's function that creates a pipeline.
        embeddings: see ``Embeddings``.
        space: the normalisation of the VAE's latents.
        in_tiles: decode images of any size in small tiles.
    """
    latents: list[Tensor | None] = [None] * len(requests)
    with evaluating(model.components.values()):
        for group in _batches(requests):
            scheduler = scheduler_of(scheduler_config, requests[group[0]].sampler)
            pipeline = make_pipeline(model.components["unet"], scheduler)
            pipeline.set_progress_bar_config(disable=True)
            with _given(source, model, [requests[i] for i in group], space, in_tiles):
                batch = _denoise(pipeline, model, [requests[i] for i in group], embeddings, source)
            for index, latent_CHW in zip(group, batch, strict=True):
                latents[index] = latent_CHW
    drawn = [latent for latent in latents if latent is not None]
    return decode(source, model.device, drawn, space, in_tiles)


def scheduler_of(scheduler_config: Mapping[str, Any], sampler: str) -> Any:
    """Return diffusers' scheduler for a value of ``sample.sampler``."""
    config = dict(scheduler_config)
    if config["rescale_betas_zero_snr"]:
        config["timestep_spacing"] = "trailing"  # so that sampling starts from pure noise (arXiv 2305.08891, 3.3)
    cls, options = SAMPLERS[sampler]
    return cls.from_config(config, **options)


def _given(
    source: BaseSource, model: LoadedModel, requests: Sequence[PreviewRequest], space: LatentSpace, in_tiles: bool
) -> AbstractContextManager[None]:
    """Return a context in which an inpainting model gets the requests' masks and visible parts.

    For other models it does nothing.
    """
    if source.config("unet").whole("in_channels", 4) != inpainting.CHANNELS:
        return nullcontext()
    files = [tuple(sorted(request.inputs.items())) for request in requests]
    different = dict(zip(files, requests, strict=True))
    pixels_CHW, hidden_1HW = zip(*map(inpainting.seen_and_hidden, different.values()), strict=True)
    seen_BCHW = encode(source, model.device, torch.stack(pixels_CHW), space, in_tiles)
    step = pixels_per_latent(source)
    rows = [list(different).index(each) for each in files]
    hidden_BCHW = torch.stack(hidden_1HW)[:, :, ::step, ::step].to(model.device)
    return inpainting.given(model.components["unet"], seen_BCHW[rows], hidden_BCHW[rows])


def _batches(requests: Sequence[PreviewRequest]) -> list[list[int]]:
    """Group indices of requests to sample together: same size, steps, guidance and sampler, up to BATCH_PIXELS."""
    groups: dict[tuple[int, int, int, float, str], list[int]] = {}
    for index, request in enumerate(requests):
        key = (request.width, request.height, request.steps, request.guidance_scale, request.sampler)
        groups.setdefault(key, []).append(index)
    batches = []
    for (width, height, *_), members in groups.items():
        size = max(1, BATCH_PIXELS // (width * height))
        batches += [members[start : start + size] for start in range(0, len(members), size)]
    return batches


def _denoise(
    pipeline: Any,
    model: LoadedModel,
    requests: Sequence[PreviewRequest],
    embeddings: Embeddings,
    source: BaseSource,
) -> Tensor:
    first = requests[0]
    factor = pixels_per_latent(source)
    shape = (source.config("unet").whole("out_channels", 4), first.height // factor, first.width // factor)
    generators = [torch.Generator().manual_seed(request.seed) for request in requests]
    noise_BCHW = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    count, guided = len(requests), first.guidance_scale > 1
    negative = [request.negative_prompt for request in requests] if guided else []
    embedded = _embed(embeddings, [*(request.prompt for request in requests), *negative], model)
    arguments = {name: tensor[:count] for name, tensor in embedded.items()}
    if guided:
        arguments |= {f"negative_{name}": tensor[count:] for name, tensor in embedded.items()}
    result = pipeline(
        height=first.height,
        width=first.width,
        num_inference_steps=first.steps,
        guidance_scale=first.guidance_scale,
        latents=noise_BCHW.to(model.device, model.dtype),
        generator=generators,  # some samplers add noise in each step
        output_type="latent",
        **arguments,
    )
    latents_BCHW: Tensor = result.images
    return latents_BCHW.float()


def _embed(embeddings: Embeddings, prompts: Sequence[str], model: LoadedModel) -> dict[str, Tensor]:
    encoded = {prompt: embeddings(prompt) for prompt in dict.fromkeys(prompts)}
    embedded = {}
    for name in encoded[prompts[0]]:
        rows = [encoded[prompt][name] for prompt in prompts]
        length = math.lcm(*(row.shape[1] for row in rows))  # fewer chunks are repeated, as in training
        copies = [torch.cat([row] * (length // row.shape[1]), dim=1) for row in rows]
        embedded[name] = torch.cat(copies).to(model.dtype)
    return embedded
