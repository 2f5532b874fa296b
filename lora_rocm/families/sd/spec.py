"""What the light half knows of Stable Diffusion 1.x and 2.x: their keys and their names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_rocm.families.spec import CheckpointSection, FamilySpec
from lora_rocm.recipe.schema import DdpmSection, PathText

WHERE = "A diffusers folder, a hub id or a single .safetensors checkpoint."


class Sd15Section(CheckpointSection):
    """The base model. Stable Diffusion 1.x and its fine-tunes."""

    family: Literal["sd15"] = Field("sd15", description="Model family.")
    name_or_path: PathText = Field(description=WHERE)


class Sd2Section(CheckpointSection):
    """The base model. Stable Diffusion 2.x and its fine-tunes."""

    family: Literal["sd2"] = Field("sd2", description="Model family.")
    name_or_path: PathText = Field(description=WHERE)


SPEC_SD15 = FamilySpec(
    name="sd15",
    title="Stable Diffusion 1.x",
    model_section=Sd15Section,
    objective_section=DdpmSection,
    implementation="lora_rocm.families.sd.family:Sd15",
)
SPEC_SD2 = FamilySpec(
    name="sd2",
    title="Stable Diffusion 2.x",
    model_section=Sd2Section,
    objective_section=DdpmSection,
    implementation="lora_rocm.families.sd.family:Sd2",
)
