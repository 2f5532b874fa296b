"""Masks as cache entries: for each view of an image one, on the grid of its latents, by content and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lora_rocm.dataset.buckets import Size
from lora_rocm.dataset.columns import Lazy
from lora_rocm.dataset.entry_spec import MASK, EntrySpec, TensorSpec
from lora_rocm.dataset.folders import shown
from lora_rocm.dataset.hf_datasets import DatasetRow
from lora_rocm.dataset.image_io import MAX_IMAGE_BYTES, UnreadableImage, decode_mask
from lora_rocm.dataset.masks import MASK_FIX, Masks, fits, mask_on_grid
from lora_rocm.errors import DataError
from lora_rocm.families.objectives.loss import LOSS_MASK
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.latent_cache.image_preprocess import Wanted, hash_of

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.transfer import DeviceTransfer
    from lora_rocm.families.base import Encode, Encoder, Inputs, Tensors
    from lora_rocm.recipe.schema import Recipe

MASK_ENTRY = EntrySpec(MASK, (MASK,), {LOSS_MASK: TensorSpec("float32", "CHW")}, follows_shape=True)


@dataclass(frozen=True)
class MaskEncoder:
    """Hands on masks, which ``MaskWanted`` has reduced.

    sources: the masks of each source. step_hw: pixels of one latent.
    """

    sources: Sequence[Masks]
    step_hw: Size
    entry: EntrySpec = MASK_ENTRY

    @property
    def fingerprint(self) -> str:
        return f"mask1-{self.step_hw[0]}x{self.step_hw[1]}"

    def in_tiles(self) -> None:
        return None

    def load(self, door: DeviceTransfer) -> Encode:
        def encode(inputs: Inputs) -> Tensors:
            mask_CHW = inputs[MASK]
            assert isinstance(mask_CHW, Tensor)
            return {LOSS_MASK: mask_CHW}

        return encode


def mask_encoders(recipe: Recipe) -> tuple[MaskEncoder, ...]:
    """The encoder of masks; none if no source has any, and nothing is cached or sent then."""
    sources = recipe.data.resolved_sources()
    if not any(source.mask_path or source.alpha_mask for source in sources):
        return ()
    height, width = (recipe.spec.shapes[axis].per_latent for axis in ("h", "w"))
    return (MaskEncoder([Masks(source, index) for index, source in enumerate(sources)], (height, width)),)


def read_by(encoder: Encoder, samples: Sequence[Wanted]) -> Sequence[Wanted]:
    """What an encoder reads of each sample: its image, or its mask."""
    return _MasksOf(samples, encoder) if isinstance(encoder, MaskEncoder) else samples


class _MasksOf(Lazy[Wanted]):
    """The masks of samples."""

    def __init__(self, samples: Sequence[Wanted], encoder: MaskEncoder) -> None:
        self._samples, self._encoder = samples, encoder

    def __len__(self) -> int:
        return len(self._samples)

    def _made(self, start: int, stop: int) -> Sequence[Wanted]:
        return [self._mask_of(image) for image in self._samples[start:stop]]

    def _mask_of(self, image: Wanted) -> Wanted:
        encoder = self._encoder
        mask = encoder.sources[image.sample.source].of(image.sample)
        return MaskWanted(image.sample, image.geometry, image.flips, mask=mask, step_hw=encoder.step_hw)


@dataclass(frozen=True, slots=True)
class MaskWanted(Wanted):
    """The mask of a sample whose entries are wanted in the cache.

    mask: what holds it; None: the image counts everywhere. step_hw: pixels of one latent.
    """

    mask: Path | DatasetRow | None = None
    step_hw: Size = (1, 1)

    @property
    def reads(self) -> str:
        return MASK

    @property
    def file(self) -> Path | None:
        return self.mask if isinstance(self.mask, Path) else None

    @property
    def _is_alpha(self) -> bool:
        return self.mask == self.sample.location

    def hashed(self) -> str:
        try:
            return hash_of(self.read())
        except DataError:
            return ""

    def read(self) -> bytes:
        if self.mask is None:
            return b""
        if self._is_alpha:
            return Wanted.read(self)
        assert isinstance(self.mask, Path)
        try:
            return read_plain(self.mask, MAX_IMAGE_BYTES)
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror or error}") from error

    def decoded(self, content: bytes) -> Image.Image:
        from PIL import Image

        sample = self.sample
        if self.mask is None:
            return Image.new("L", (sample.width, sample.height), 255)
        try:
            mask = decode_mask(content, self._is_alpha)
        except UnreadableImage as error:
            raise self._unusable(f"cannot be read: {error}") from error
        if not fits(mask.size, (sample.width, sample.height)):
            raise self._unusable(f"has other proportions: it is {mask.size[0]}x{mask.size[1]}")
        return mask

    def tensor(self, image: Image.Image, flip: bool) -> Tensor:
        mask_HW = mask_on_grid(np.asarray(image), self.geometry, flip, self.step_hw)
        if not mask_HW.any():
            raise self._unusable("leaves nothing to train on: it is black where the image is cut")
        return torch.from_numpy(mask_HW[None])

    def parts(self, sha256: str, flip: bool) -> tuple[Any, ...]:
        return (*Wanted.parts(self, sha256, flip), self._is_alpha)

    def _unusable(self, why: str) -> DataError:
        return DataError("mask-unusable", f"The mask of {self.sample.key} {why}.", where=shown(self.mask), fix=MASK_FIX)
