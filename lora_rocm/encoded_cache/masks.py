"""Masks as cache entries. Each view of an image has one, at latent resolution, keyed by content and crop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lora_rocm.dataset.companions.masks import MASK, MASK_FIX, decode_mask, fits, mask_on_grid
from lora_rocm.dataset.entry_spec import EntrySpec, TensorSpec
from lora_rocm.dataset.images.buckets import Size
from lora_rocm.dataset.images.image_io import UnreadableImage
from lora_rocm.dataset.images.views import ImageView
from lora_rocm.encoded_cache.companion import CompanionWanted
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest
from lora_rocm.families.objectives.loss import LOSS_MASK, LOSS_WEIGHTS

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.dataset.rows.hf_datasets import DatasetRow
    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encode, Inputs, Tensors
    from lora_rocm.recipe.schema import Recipe

TENSOR = TensorSpec("float32", "CHW")
MASK_ENTRY = EntrySpec(MASK, (MASK,), {LOSS_MASK: TENSOR}, follows_shape=True)
WEIGHTS_ENTRY = EntrySpec(MASK, (MASK,), {LOSS_WEIGHTS: TENSOR}, follows_shape=True)
"""Used instead of ``MASK_ENTRY`` if the loss is not divided by the area of the mask."""


@dataclass(frozen=True)
class MaskEncoder:
    """Returns masks unchanged, because ``MaskWanted`` has already scaled them to latent resolution.

    step_hw: pixels per latent, as (height, width).
    """

    step_hw: Size
    entry: EntrySpec = MASK_ENTRY

    @property
    def fingerprint(self) -> str:
        return f"{self._tensor}2-{self.step_hw[0]}x{self.step_hw[1]}"

    @property
    def _tensor(self) -> str:
        return next(iter(self.entry.tensors))

    def in_tiles(self) -> None:
        return None

    def companion_of(self, image: EncodeRequest) -> EncodeRequest:
        return MaskWanted(image.sample, image.geometry, image.views, place=mask_place(image), step_hw=self.step_hw)

    def load(self, placement: Placement) -> Encode:
        def encode(inputs: Inputs) -> Tensors:
            mask_CHW = inputs[MASK]
            assert isinstance(mask_CHW, Tensor)
            return {self._tensor: mask_CHW}

        return encode


def mask_place(image: EncodeRequest) -> Path | DatasetRow | None:
    """Return the file or dataset row of an image's mask, or None if it has no mask."""
    mask = image.sample.companion(MASK)
    return None if mask is None else mask.place


def mask_encoder(recipe: Recipe) -> MaskEncoder | None:
    """Return the mask encoder, or None if no source has masks; no masks are then cached or sent to the device."""
    sources = recipe.data.resolved_sources()
    if not any(source.mask_path or source.alpha_mask for source in sources):
        return None
    height, width = (recipe.spec.axes[axis].per_latent for axis in ("h", "w"))
    entry = MASK_ENTRY if recipe.data.normalize_masked_area_loss else WEIGHTS_ENTRY
    return MaskEncoder((height, width), entry)


@dataclass(frozen=True, slots=True)
class MaskWanted(CompanionWanted):
    """Request for a sample's mask. Without a mask, every pixel of the image counts in the loss.

    step_hw: pixels per latent, as (height, width).
    """

    kind: str = MASK
    noun: ClassVar[str] = "mask"
    fix: ClassVar[str] = MASK_FIX
    step_hw: Size = (1, 1)

    @property
    def _is_alpha(self) -> bool:
        return self.place == self.sample.location

    def decoded(self, content: bytes) -> Image.Image:
        from PIL import Image

        sample = self.sample
        if self.place is None:
            return Image.new("L", (sample.width, sample.height), 255)
        try:
            mask = decode_mask(content, self._is_alpha)
        except UnreadableImage as error:
            raise self.unusable(f"cannot be read: {error}") from error
        if not fits(mask.size, (sample.width, sample.height)):
            raise self.unusable(f"has other proportions: it is {mask.size[0]}x{mask.size[1]}")
        return mask

    def tensor(self, image: Image.Image, view: ImageView) -> Tensor:
        mask_HW = mask_on_grid(np.asarray(image), self.geometry_of(view), view.flip, self.step_hw)
        mask_HW = mask_HW.clip(min=self.sample.options.unmasked_weight)
        if not mask_HW.any():
            raise self.unusable("leaves nothing to train on: it is black in the whole crop")
        return torch.from_numpy(mask_HW[None])

    def parts(self, sha256: str, view: ImageView) -> tuple[Any, ...]:
        colourless = replace(view, colour=0)  # views that differ in colours alone share a mask
        return (*EncodeRequest.parts(self, sha256, colourless), self._is_alpha, self.sample.options.unmasked_weight)
