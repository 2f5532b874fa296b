"""Samples preview images from the live model with Euler's method along the flow and classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.families.base import LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.common.recompute import evaluating
from lora_rocm.families.common.vae import decode, encode_control, pixels_per_latent
from lora_rocm.families.objectives.base import CONTROL_LATENTS, LatentSpace
from lora_rocm.families.objectives.flow import published_shift, shifted

GUIDANCE = "guidance"  # name in the batch of the guidance [B], float32, that a preview asks for


class Flow(Protocol):
    """The members of ``TransformerFamily`` that sampling needs."""

    patch: int
    told_guidance: bool

    @property
    def source(self) -> BaseSource: ...
    @property
    def latents(self) -> LatentSpace: ...
    @property
    def scheduler_config(self) -> Mapping[str, Any]: ...
    def velocity(self, model: LoadedModel, latents_BCHW: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor: ...


@torch.no_grad()
def sample_images(
    family: Flow,
    model: LoadedModel,
    requests: Sequence[PreviewRequest],
    text: Callable[[str], Tensors],
    in_tiles: bool = False,
) -> list[Image.Image]:
    """Sample an image for every request, in the order of the requests.

    The initial noise comes from a CPU generator seeded per request, so an image is the same on every device up to
    rounding. The VAE is loaded after denoising and freed at the end.

    Args:
        family: predicts the velocity.
        model: the live model, which is left unchanged.
        requests: the images to sample.
        text: maps a prompt to its cached tensors (no batch dimension, CPU).
        in_tiles: decode images of any size in small tiles.
    """
    ratio, channels = pixels_per_latent(family.source), len(family.latents.shift_C)
    drawn: list[Tensor] = []
    with evaluating(model.components.values()):
        for request in requests:
            shape = (channels, request.height // ratio, request.width // ratio)
            noise_CHW = torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))
            more = {}
            if (path := request.inputs.get("control_image")) is not None:
                size_hw = request.height, request.width
                more[CONTROL_LATENTS] = encode_control(
                    family.source, model.device, path, size_hw, family.latents, in_tiles
                )
            drawn.append(denoised(family, model, request, noise_CHW.to(model.device), text, more=more))
    return decode(family.source, model.device, drawn, family.latents, in_tiles)


def denoised(
    family: Flow,
    model: LoadedModel,
    request: PreviewRequest,
    noisy_CHW: Tensor,
    text: Callable[[str], Tensors],
    first_sigma: float = 1.0,
    more: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Return normalised latents, float32 [C, H, W], denoised from ``noisy_CHW`` on the model's device.

    ``first_sigma``: noise level of ``noisy_CHW``. ``more``: additional tensors of the batch, with a batch dimension.
    """
    sides = [side // family.patch for side in noisy_CHW.shape[-2:]]
    even = torch.linspace(1.0, 0.0, request.steps + 1)
    levels = (first_sigma * shifted(even, published_shift(family.scheduler_config, sides[0] * sides[1]))).tolist()
    guided = request.guidance_scale != 1.0 and not family.told_guidance
    prompts = [request.prompt, *([request.negative_prompt] if guided else [])]
    texts = [{name: tensor[None].to(model.device) for name, tensor in text(prompt).items()} for prompt in prompts]
    for batch in texts:
        batch |= {GUIDANCE: torch.full((1,), request.guidance_scale, device=model.device), **more}
    x_BCHW = noisy_CHW[None]
    for sigma, following in zip(levels, levels[1:], strict=False):
        sigma_B = torch.full((1,), sigma, device=model.device)
        velocity, *other = (family.velocity(model, x_BCHW, sigma_B, batch).float() for batch in texts)
        if other:
            velocity = other[0] + request.guidance_scale * (velocity - other[0])
        x_BCHW = x_BCHW + (following - sigma) * velocity
    return x_BCHW[0]
