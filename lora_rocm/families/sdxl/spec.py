"""The specification of SDXL, importable without torch: recipe section and names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_rocm.families.spec import CheckpointSection, FamilySpec, FileMetadata, image_axes
from lora_rocm.recipe.sections import ALL_SAMPLERS, DdpmSection, PathOrHubId


class SdxlSection(CheckpointSection):
    """The base model. SDXL and its fine-tunes."""

    family: Literal["sdxl"] = Field("sdxl", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(
        description="A diffusers folder, a hub id, a single .safetensors checkpoint, or builtin:tiny-sdxl."
    )


SPEC = FamilySpec(
    name="sdxl",
    title="SDXL",
    model_section=SdxlSection,
    objective_section=DdpmSection,
    implementation="lora_rocm.families.sdxl.family:Sdxl",
    component="unet",
    samplers=ALL_SAMPLERS,
    trains_norms=True,
    head_widths=(64,),
    text_components=("text_encoder", "text_encoder_2"),
    embedding_keys={"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
    axes=image_axes(multiple=8, per_token=16),
    metadata=FileMetadata(
        base_version="sdxl_base_v1-0",
        architecture="stable-diffusion-xl-v1-base/lora",
        implementation="https://github.com/Stability-AI/generative-models",
        extra={"ss_v2": "False"},
    ),
)
