"""What the light half knows of SDXL: its keys and its names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.schema import DdpmSection, ModelSection, PathText


class SdxlSection(ModelSection):
    """The base model. SDXL and its fine-tunes."""

    family: Literal["sdxl"] = Field("sdxl", description="Model family.")
    name_or_path: PathText = Field(
        description="A diffusers folder, a hub id, a single .safetensors checkpoint, or builtin:tiny-sdxl."
    )
    config: PathText | None = Field(
        None, description="Folder with the diffusers configs and tokenizers for a single-file checkpoint."
    )
    vae: PathText | None = Field(None, description="Another VAE: a diffusers folder or a single .safetensors file.")
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = Field(
        "auto", description="What the model predicts; auto reads the model's own scheduler config."
    )


SPEC = FamilySpec(
    name="sdxl",
    title="SDXL",
    model_section=SdxlSection,
    objective_section=DdpmSection,
    implementation="lora_rocm.families.sdxl.family:Sdxl",
)
