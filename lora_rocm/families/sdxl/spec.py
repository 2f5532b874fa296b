"""What the light half knows of SDXL: its keys and its names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_rocm.families.spec import CheckpointSection, FamilySpec
from lora_rocm.recipe.schema import DdpmSection, PathText


class SdxlSection(CheckpointSection):
    """The base model. SDXL and its fine-tunes."""

    family: Literal["sdxl"] = Field("sdxl", description="Model family.")
    name_or_path: PathText = Field(
        description="A diffusers folder, a hub id, a single .safetensors checkpoint, or builtin:tiny-sdxl."
    )


SPEC = FamilySpec(
    name="sdxl",
    title="SDXL",
    model_section=SdxlSection,
    objective_section=DdpmSection,
    implementation="lora_rocm.families.sdxl.family:Sdxl",
)
