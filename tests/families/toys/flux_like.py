"""FLUX in miniature, of diffusers' own blocks: two streams and then one, called by keyword, with tuples as outputs.

The states of a caption are as many as its words; a batch is padded, and a mask hides the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, Pad, TensorSpec
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.families.base import Encoder, Inputs, LoadedModel, PreviewRequest, Tensors
from tests.families.toys.base import WORD_WIDTH, ToyEncoder, ToyTransformer, word_states

CHANNELS, STRIDE_PX = 3, 8


class FluxLike(ToyTransformer):
    """Implements ``ModelFamily``."""

    name = "toy-flow"
    targets = r".*\.(to_q|to_k|add_q_proj|to_out\.0|net\.0\.proj|proj_mlp)"
    pipeline = FluxPipeline
    reader_options = MappingProxyType({"network_alphas": None})

    def build(self) -> nn.Module:
        return FluxTransformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WORD_WIDTH,
            pooled_projection_dim=WORD_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )

    def encoders(self) -> Sequence[Encoder]:
        latents = EntrySpec("latents", (IMAGE,), {"latents": TensorSpec("float32", "CHW")}, follows_shape=True)
        words = {
            "states": TensorSpec("float32", "SD", Pad("S")),
            "states_mask": TensorSpec("bool", "S", Pad("S")),
            "pooled": TensorSpec("float32", "D"),
        }
        return [ToyEncoder(latents, self._latents), ToyEncoder(EntrySpec("words", (CAPTION,), words), self._words)]

    def _latents(self, inputs: Inputs) -> Tensors:
        pixels_CHW = inputs[IMAGE]
        assert isinstance(pixels_CHW, Tensor)
        return {"latents": avg_pool2d(pixels_CHW[None], STRIDE_PX)[0]}

    def _words(self, inputs: Inputs) -> Tensors:
        states_SD = word_states(str(inputs[CAPTION]))
        mask_S = torch.ones(len(states_SD), dtype=torch.bool)
        return {"states": states_SD, "states_mask": mask_S, "pooled": states_SD.mean(0)}

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        transformer = model.components["transformer"]
        return [
            block
            for name in ("transformer_blocks", "single_transformer_blocks")
            for block in transformer.get_submodule(name).children()
        ]

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        latents = torch.zeros(rows, CHANNELS, shape["h"] // STRIDE_PX, shape["w"] // STRIDE_PX)
        words = {"states": torch.zeros(rows, 8, WORD_WIDTH), "states_mask": torch.ones(rows, 8, dtype=torch.bool)}
        return {"latents": latents, **words, "pooled": torch.zeros(rows, WORD_WIDTH)}

    def noise_like(self, request: PreviewRequest) -> Tensor:
        rng = torch.Generator().manual_seed(request.seed)
        return torch.randn(1, CHANNELS, request.height // STRIDE_PX, request.width // STRIDE_PX, generator=rng)

    def velocity(self, model: LoadedModel, x: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        return self.with_more(model, x, sigma_B, batch)

    def with_more(
        self,
        model: LoadedModel,
        x: Tensor,
        sigma_B: Tensor,
        batch: Tensors,
        more_BSC: Tensor | None = None,
        more_places: Sequence[Tensor] = (),
    ) -> Tensor:
        """``velocity`` with further tokens after the image's tokens, and their places."""
        rows, channels, height, width = x.shape
        high, wide = height // 2, width // 2
        packed_BSC = packed(x) if more_BSC is None else torch.cat([packed(x), more_BSC], dim=1)
        places_SA = torch.cat([places(x, 0), *more_places])
        mask_BS = torch.cat([batch["states_mask"], batch["states_mask"].new_ones(packed_BSC.shape[:2])], dim=1)
        predicted_BSC = model.components["transformer"](
            hidden_states=packed_BSC.to(model.dtype),
            encoder_hidden_states=batch["states"].to(model.dtype),
            pooled_projections=batch["pooled"].to(model.dtype),
            timestep=sigma_B,
            guidance=torch.ones_like(sigma_B),
            img_ids=places_SA,
            txt_ids=places_SA.new_zeros(batch["states"].shape[1], 3),
            joint_attention_kwargs={"attention_mask": mask_BS[:, None, None]},
            return_dict=False,
        )[0]
        predicted_BSC = predicted_BSC[:, : high * wide]
        return predicted_BSC.reshape(rows, high, wide, channels, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def packed(x: Tensor) -> Tensor:
    """The tokens of latents, each a square of four."""
    rows, channels, height, width = x.shape
    squares = x.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def places(x: Tensor, number: int) -> Tensor:
    """The place of each token: number of the image, row and column."""
    high, wide = x.shape[-2] // 2, x.shape[-1] // 2
    down_S = torch.arange(high, device=x.device).repeat_interleave(wide)
    across_S = torch.arange(wide, device=x.device).repeat(high)
    return torch.stack([torch.full_like(down_S, number), down_S, across_S], dim=1).to(x.dtype)
