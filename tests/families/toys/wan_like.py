"""Wan in miniature, of diffusers' own blocks: latents with an axis of frames, text of a fixed length without a mask.

The first frame of a clip has its own latents, and each four after it share theirs. An image is a clip of one frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.families.base import Drawn, Encoder, Inputs, LoadedModel, PreviewRequest, Tensors
from tests.families.toys.base import WORD_WIDTH, ToyEncoder, ToyTransformer, painted, word_states

CHANNELS, STRIDE_PX, PER_LATENT, WORDS = 4, 16, 4, 8


def latent_frames(frames: int) -> int:
    return 1 + (frames - 1) // PER_LATENT


class WanLike(ToyTransformer):
    """Implements ``ModelFamily``."""

    name = "toy-video"
    targets = r".*\.(to_q|to_k|to_out\.0|ffn\.net\.0\.proj)"
    pipeline = WanPipeline

    def build(self) -> nn.Module:
        return WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=WORD_WIDTH,
            freq_dim=16,
            ffn_dim=48,
            num_layers=3,
        )

    def encoders(self) -> Sequence[Encoder]:
        latents = EntrySpec("latents", (IMAGE,), {"latents": TensorSpec("float32", "CFHW")}, follows_shape=True)
        words = EntrySpec("words", (CAPTION,), {"states": TensorSpec("float32", "SD")})
        return [ToyEncoder(latents, self._latents), ToyEncoder(words, self._words)]

    def _latents(self, inputs: Inputs) -> Tensors:
        pixels = inputs[IMAGE]
        assert isinstance(pixels, Tensor)
        small_FCHW = avg_pool2d(pixels if pixels.ndim == 4 else pixels[None], STRIDE_PX)
        later = [four_FCHW.mean(0) for four_FCHW in small_FCHW[1:].split(PER_LATENT)] if len(small_FCHW) > 1 else []
        small_FCHW = torch.stack([small_FCHW[0], *later])
        return {"latents": torch.cat([small_FCHW, small_FCHW.mean(1, keepdim=True)], dim=1).transpose(0, 1)}

    def _words(self, inputs: Inputs) -> Tensors:
        states_SD = torch.zeros(WORDS, WORD_WIDTH)
        found_SD = word_states(str(inputs[CAPTION]))[:WORDS]
        states_SD[: len(found_SD)] = found_SD
        return {"states": states_SD}

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        return list(model.components["transformer"].get_submodule("blocks").children())

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        frames = latent_frames(dict(shape.axes).get("frames", 1))
        latents = torch.zeros(rows, CHANNELS, frames, shape["h"] // STRIDE_PX, shape["w"] // STRIDE_PX)
        return {"latents": latents, "states": torch.zeros(rows, WORDS, WORD_WIDTH)}

    def noise_like(self, request: PreviewRequest) -> Tensor:
        rng = torch.Generator().manual_seed(request.seed)
        sides = (request.height // STRIDE_PX, request.width // STRIDE_PX)
        return torch.randn(1, CHANNELS, latent_frames(request.frames or 1), *sides, generator=rng)

    def decoded(self, latents: Tensor, request: PreviewRequest) -> Drawn:
        numbers = [0, *(number for number in range(1, latents.shape[1]) for _ in range(PER_LATENT))]
        return tuple(painted(latents[:3, number], request) for number in numbers)

    def velocity(self, model: LoadedModel, x: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        found: Tensor = model.components["transformer"](
            hidden_states=x.to(model.dtype),
            timestep=sigma_B * 1000,
            encoder_hidden_states=batch["states"].to(model.dtype),
            return_dict=False,
        )[0]
        return found
