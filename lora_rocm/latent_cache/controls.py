"""Control images as cache entries: one per view of an image, encoded as images are, keyed by content and crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from lora_rocm.dataset.buckets import covering
from lora_rocm.dataset.controls import CONTROL, CONTROL_FIX, Controls
from lora_rocm.dataset.entry_spec import IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.image_io import UnreadableImage, cut, decode
from lora_rocm.dataset.views import View
from lora_rocm.families.objectives.base import CONTROL_LATENTS, MEAN
from lora_rocm.latent_cache.companion import CompanionWanted
from lora_rocm.latent_cache.image_preprocess import Wanted, pixels_of

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encode, Encoder, Inputs, Tensors
    from lora_rocm.recipe.schema import Recipe

CONTROL_ENTRY = EntrySpec(CONTROL, (CONTROL,), {CONTROL_LATENTS: TensorSpec("float32", "CHW")}, follows_shape=True)


@dataclass(frozen=True)
class ControlEncoder:
    """Encodes control images with the family's encoder of images, and keeps the mean, which pipelines use.

    sources: the control images of each source.
    """

    images: Encoder
    sources: Sequence[Controls]
    entry: EntrySpec = CONTROL_ENTRY

    @property
    def fingerprint(self) -> str:
        return f"control1-{self.images.fingerprint}"

    def in_tiles(self) -> ControlEncoder | None:
        tiled = self.images.in_tiles()
        return None if tiled is None else replace(self, images=tiled)

    def companion_of(self, image: Wanted) -> Wanted:
        place = self.sources[image.sample.source].of(image.sample)
        return ControlWanted(image.sample, image.geometry, image.views, place=place)

    def load(self, door: Placement) -> Encode:
        encode = self.images.load(door)

        def encode_control(inputs: Inputs) -> Tensors:
            return {CONTROL_LATENTS: encode({IMAGE: inputs[CONTROL]})[MEAN]}

        return encode_control


def control_encoder(recipe: Recipe, encoders: Sequence[Encoder]) -> ControlEncoder | None:
    """The encoder of control images; None if the recipe has none. ``encoders``: those of the family."""
    if not recipe.data.has_controls:
        return None
    images = next(encoder for encoder in encoders if encoder.entry.inputs == (IMAGE,))
    sources = recipe.data.resolved_sources()
    return ControlEncoder(images, [Controls(source, source.index) for source in sources])


@dataclass(frozen=True, slots=True)
class ControlWanted(CompanionWanted):
    """The control image of a sample: scaled to cover the sample's bucket, cropped at the centre, mirrored with it."""

    kind: ClassVar[str] = CONTROL
    noun: ClassVar[str] = "control image"
    fix: ClassVar[str] = CONTROL_FIX

    def decoded(self, content: bytes) -> Image.Image:
        try:
            return decode(content)
        except UnreadableImage as error:
            raise self.unusable(f"cannot be read: {error}") from error

    def tensor(self, image: Image.Image, view: View) -> Tensor:
        return pixels_of(cut(image, covering((image.height, image.width), self.geometry.target_hw), view.flip))

    def parts(self, sha256: str, view: View) -> tuple[object, ...]:
        return sha256, (self.geometry.target_hw, view.flip)
