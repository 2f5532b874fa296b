"""The extra inputs of an inpainting base model: the mask, and the image with the masked part hidden.

White parts of the mask are hidden, and the model paints them. As in diffusers' ``StableDiffusionXLInpaintPipeline``,
the mask's threshold is one half, and hidden pixels are grey (0). The mask is reduced to latent resolution by taking the
first pixel of each cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_rocm.dataset.companions.masks import mask_on_grid
from lora_rocm.dataset.entry_spec import IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.images.buckets import Size
from lora_rocm.dataset.images.views import ImageView
from lora_rocm.dataset.rows.hf_datasets import DatasetRow
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, hash_of
from lora_rocm.encoded_cache.masks import MaskWanted, mask_place
from lora_rocm.families.objectives.base import HIDDEN_MASK, MEAN, SEEN_LATENTS
from lora_rocm.foundation.seeds import fraction

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encode, Encoder, Inputs, ModelFamily, Tensors
    from lora_rocm.recipe.schema import Recipe

HIDDEN = "hidden"
INPAINT_ENTRY = EntrySpec(
    HIDDEN,
    (HIDDEN,),
    {HIDDEN_MASK: TensorSpec("float32", "CHW"), SEEN_LATENTS: TensorSpec("float32", "CHW")},
    follows_shape=True,
)
WHOLE_SHARE = 0.25
"""Share of generated masks that hide the whole image, as in Stable Diffusion Inpainting (its model card)."""
LEAST_SIDE = 0.25  # of a drawn rectangle, as a fraction of the image's side


@dataclass(frozen=True)
class InpaintEncoder:
    """Encodes the visible part of an image with the family's image encoder. Only the mean is stored.

    step_hw: pixels per latent, as (height, width).
    """

    images: Encoder
    step_hw: Size
    entry: EntrySpec = INPAINT_ENTRY

    @property
    def fingerprint(self) -> str:
        return f"{HIDDEN}1-{self.images.fingerprint}"

    def in_tiles(self) -> InpaintEncoder | None:
        tiled = self.images.in_tiles()
        return None if tiled is None else replace(self, images=tiled)

    def companion_of(self, image: EncodeRequest) -> EncodeRequest:
        options, place = image.sample.options, mask_place(image)
        drawn = not (options.mask_path or options.alpha_mask)
        return HiddenWanted(image.sample, image.geometry, image.views, place=place, drawn=drawn)

    def load(self, placement: Placement) -> Encode:
        encode = self.images.load(placement)
        step_y, step_x = self.step_hw

        def encode_seen(inputs: Inputs) -> Tensors:
            both_CHW = inputs[HIDDEN]
            assert isinstance(both_CHW, Tensor)
            seen_CHW, hidden_CHW = both_CHW[:-1].contiguous(), both_CHW[-1:, ::step_y, ::step_x].contiguous()
            return {HIDDEN_MASK: hidden_CHW, SEEN_LATENTS: encode({IMAGE: seen_CHW})[MEAN]}

        return encode_seen


def inpaint_encoder(recipe: Recipe, family: ModelFamily, encoders: Sequence[Encoder]) -> InpaintEncoder | None:
    """Return the encoder for an inpainting model's extra inputs, or None if the family does not inpaint.

    ``encoders``: the family's encoders.
    """
    if not family.inpaints:
        return None
    images = next(encoder for encoder in encoders if encoder.entry.inputs == (IMAGE,))
    height, width = (recipe.spec.axes[axis].per_latent for axis in "hw")
    return InpaintEncoder(images, (height, width))


@dataclass(frozen=True, slots=True)
class HiddenWanted(EncodeRequest):
    """Request for the cache entries of an image's visible part and mask. The encoder's input is float32 [4, H, W].

    place: the file or dataset row of the mask; None to hide the whole image.
    drawn: whether a mask is generated for each image, because the source has no masks.
    """

    place: Path | DatasetRow | None = None
    drawn: bool = False

    @property
    def reads(self) -> str:
        return HIDDEN

    def tensor(self, image: Image.Image, view: ImageView) -> Tensor:
        pixels_CHW = EncodeRequest.tensor(self, image, view)
        hidden_HW = torch.from_numpy(self._hidden(view).astype(np.float32))
        return torch.cat([pixels_CHW * (1.0 - hidden_HW), hidden_HW[None]])

    def parts(self, sha256: str, view: ImageView) -> tuple[object, ...]:
        about: object = self._box() if self.drawn else hash_of(self._mask().read())
        return (*EncodeRequest.parts(self, sha256, view), self.drawn, about)

    def _mask(self) -> MaskWanted:
        return MaskWanted(self.sample, self.geometry, self.views, place=self.place)

    def _hidden(self, view: ImageView) -> NDArray[np.bool_]:
        """Return which pixels of the view are hidden, bool [H, W]."""
        height, width = self.geometry.target_hw
        if not self.drawn:
            mask = self._mask()
            return mask_on_grid(np.asarray(mask.decoded(mask.read())), self.geometry_of(view), view.flip, (1, 1)) >= 0.5
        hidden_HW = np.zeros((height, width), np.bool_)
        top, left, high, wide = self._box()
        hidden_HW[top : top + high, left : left + wide] = True
        return hidden_HW[:, ::-1] if view.flip else hidden_HW

    def _box(self) -> tuple[int, int, int, int]:
        """Return (top, left, height, width) of the generated mask in pixels.

        It differs between images, but is the same in every run.
        """
        height, width = self.geometry.target_hw
        key = self.sample.key
        if fraction("all hidden", key) < WHOLE_SHARE:
            return 0, 0, height, width
        sides = [LEAST_SIDE + (1 - LEAST_SIDE) * fraction("hidden side", key, axis) for axis in range(2)]
        high, wide = (max(round(share * whole), 1) for share, whole in zip(sides, (height, width), strict=True))
        top, left = (
            int(fraction("hidden place", key, axis) * (whole - side + 1))
            for axis, (whole, side) in enumerate(((height, high), (width, wide)))
        )
        return top, left, high, wide
