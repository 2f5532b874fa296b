"""Control images as cache entries. Each view of an image has one, encoded like an image, keyed by content and crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from lora_rocm.dataset.companions.controls import CONTROL, CONTROL_FIX, control_name
from lora_rocm.dataset.entry_spec import IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.images.buckets import choose_bucket, covering
from lora_rocm.dataset.images.image_io import UnreadableImage, decode, resized_crop
from lora_rocm.dataset.images.views import ImageView
from lora_rocm.encoded_cache.companion import CompanionWanted
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, pixels_of
from lora_rocm.families.objectives.base import CONTROL_LATENTS, MEAN

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encode, Encoder, Inputs, Tensors
    from lora_rocm.recipe.schema import DataSection, Recipe


def control_latents(number: int) -> str:
    """Return the tensor name for a control image's number: ``CONTROL_LATENTS``, "control_2_latents", ..."""
    return CONTROL_LATENTS.replace(CONTROL, control_name(number))


def control_entry(number: int, keeps_size: bool = False) -> EntrySpec:
    """Return the specification of a control image's cache entry. A sample's control images are numbered from 0."""
    name, tensors = control_name(number), {control_latents(number): TensorSpec("float32", "CHW")}
    return EntrySpec(name, (name,), tensors, follows_shape=True, keeps_size=keeps_size)


CONTROL_ENTRY = control_entry(0)


@dataclass(frozen=True)
class ControlEncoder:
    """Encodes control images with the family's image encoder. Only the mean is stored, since pipelines use it."""

    images: Encoder
    data: DataSection
    entry: EntrySpec = CONTROL_ENTRY

    @property
    def fingerprint(self) -> str:
        return f"control1-{self.images.fingerprint}"

    def in_tiles(self) -> ControlEncoder | None:
        tiled = self.images.in_tiles()
        return None if tiled is None else replace(self, images=tiled)

    def companion_of(self, image: EncodeRequest) -> EncodeRequest:
        companion = image.sample.companion(self.entry.name)
        assert companion is not None, "an image without a control image is refused"
        geometry, data = image.geometry, self.data
        if self.entry.keeps_size:
            geometry = choose_bucket(
                companion.width,
                companion.height,
                image.sample.options.resolution,
                data.bucket_step,
                data.bucket_max_aspect,
                data.enable_bucket,
                upscale=True,
            )
        return ControlWanted(image.sample, geometry, image.views, place=companion.place, kind=self.entry.name)

    def load(self, placement: Placement) -> Encode:
        encode, name = self.images.load(placement), self.entry.name
        (tensor,) = self.entry.tensors

        def encode_control(inputs: Inputs) -> Tensors:
            return {tensor: encode({IMAGE: inputs[name]})[MEAN]}

        return encode_control


def control_encoders(recipe: Recipe, encoders: Sequence[Encoder]) -> list[ControlEncoder]:
    """Return one encoder for each control image that a sample has. ``encoders``: the family's encoders."""
    images = [encoder for encoder in encoders if encoder.entry.inputs == (IMAGE,)]
    keeps_size = recipe.model.controls_keep_size
    entries = [control_entry(number, keeps_size) for number in range(recipe.data.num_controls)]
    return [ControlEncoder(images[0], recipe.data, entry) for entry in entries]


@dataclass(frozen=True, slots=True)
class ControlWanted(CompanionWanted):
    """Request for a sample's control image.

    It is scaled to cover the sample's bucket, cropped at the centre, and mirrored like the sample.
    """

    kind: str = CONTROL
    noun: ClassVar[str] = "control image"
    fix: ClassVar[str] = CONTROL_FIX

    def decoded(self, content: bytes) -> Image.Image:
        try:
            return decode(content)
        except UnreadableImage as error:
            raise self.unusable(f"cannot be read: {error}") from error

    def tensor(self, image: Image.Image, view: ImageView) -> Tensor:
        return pixels_of(resized_crop(image, covering((image.height, image.width), self.geometry.target_hw), view.flip))

    def parts(self, sha256: str, view: ImageView) -> tuple[object, ...]:
        return sha256, (self.geometry.target_hw, view.flip)
