"""The specification of Z-Image, importable without torch: recipe section and names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_rocm.families.spec import FamilySpec, FileMetadata, TransformerSection, image_axes
from lora_rocm.recipe.sections import FlowSection, PathOrHubId


class ZImageSection(TransformerSection):
    """The base model. Z-Image and its fine-tunes."""

    family: Literal["z-image"] = Field("z-image", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(
        description="A diffusers folder, a hub id, a .safetensors file of the transformer or of several components, "
        "or builtin:tiny-z-image."
    )
    variant: Literal["base", "turbo"] = Field(
        "base",
        description="The Z-Image variant. Files do not identify it. Turbo is distilled, so training on the "
        "base is better.",
    )


SPEC = FamilySpec(
    name="z-image",
    title="Z-Image",
    model_section=ZImageSection,
    objective_section=FlowSection,
    implementation="lora_rocm.families.z_image.family:ZImage",
    component="transformer",
    axes=image_axes(multiple=16, per_token=16),
    guidance=4.0,
    fp16="never",
    head_widths=(128,),
    metadata=FileMetadata(
        base_version="zimage",
        architecture="z-image/lora",
        implementation="https://github.com/Tongyi-MAI/Z-Image",
    ),
)
