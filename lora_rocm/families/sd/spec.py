"""Specifications of Stable Diffusion 1.x and 2.x, importable without torch: recipe sections and names."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from lora_rocm.families.spec import CheckpointSection, FamilySpec, FileMetadata, image_axes
from lora_rocm.recipe.sections import ALL_SAMPLERS, DdpmSection, PathOrHubId

WHERE = "A diffusers folder, a hub id or a single .safetensors checkpoint."


class Sd15Section(CheckpointSection):
    """The base model. Stable Diffusion 1.x and its fine-tunes."""

    family: Literal["sd15"] = Field("sd15", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(description=WHERE)


class Sd2Section(CheckpointSection):
    """The base model. Stable Diffusion 2.x and its fine-tunes."""

    family: Literal["sd2"] = Field("sd2", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(description=WHERE)


SPEC_SD15 = FamilySpec(
    name="sd15",
    title="Stable Diffusion 1.x",
    model_section=Sd15Section,
    objective_section=DdpmSection,
    implementation="lora_rocm.families.sd.family:Sd15",
    component="unet",
    samplers=ALL_SAMPLERS,
    trains_norms=True,
    text_components=("text_encoder",),
    embedding_keys={"text_encoder": "emb_params"},
    axes=image_axes(multiple=8, per_token=8),
    metadata=FileMetadata(
        base_version="sd_v1",
        architecture="stable-diffusion-v1/lora",
        implementation="https://github.com/CompVis/stable-diffusion",
        extra={"ss_v2": "False"},
    ),
)
SPEC_SD2 = replace(
    SPEC_SD15,
    name="sd2",
    title="Stable Diffusion 2.x",
    model_section=Sd2Section,
    implementation="lora_rocm.families.sd.family:Sd2",
    metadata=FileMetadata(
        base_version="sd_v2",
        architecture="stable-diffusion-v2/lora",
        implementation="https://github.com/Stability-AI/stablediffusion",
        extra={"ss_v2": "True"},
    ),
)
