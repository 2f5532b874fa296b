"""The encoders of a run: those of its family, and those for inputs that mean the same to every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.latent_cache.controls import control_encoders
from lora_rocm.latent_cache.image_preprocess import ReadsCompanion
from lora_rocm.latent_cache.inpainting import inpaint_encoder
from lora_rocm.latent_cache.masks import mask_encoder

if TYPE_CHECKING:
    from lora_rocm.families.base import Encoder, ModelFamily
    from lora_rocm.recipe.schema import Recipe


def run_encoders(recipe: Recipe, family: ModelFamily) -> tuple[Encoder, ...]:
    """All encoders of a run. The family's come last: the hash that is kept of a sample is its image's.

    Raises:
        TypeError: an entry reads a companion of the image, and its encoder has no ``companion_of``.
    """
    own = family.encoders()
    shared = (mask_encoder(recipe), *control_encoders(recipe, own), inpaint_encoder(recipe, family, own))
    encoders = (*(encoder for encoder in shared if encoder is not None), *own)
    for encoder in encoders:
        if not {IMAGE, CAPTION}.issuperset(encoder.entry.inputs) and not isinstance(encoder, ReadsCompanion):
            raise TypeError(f"{encoder.entry.name} reads {encoder.entry.inputs}, and its encoder has no companion_of")
    return encoders
