"""Anima's specification, importable without torch: recipe section and names."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lora_rocm.families.spec import FamilySpec, FileMetadata, TransformerSection, image_axes
from lora_rocm.recipe.sections import FlowSection, InputFolder, PathOrHubId


class AnimaSection(TransformerSection):
    """The base model. Anima and its fine-tunes."""

    part_keys: ClassVar[tuple[str, ...]] = (*TransformerSection.part_keys, "t5_tokenizer")

    family: Literal["anima"] = Field("anima", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(
        description="A diffusers folder, a hub id, or a .safetensors file of the transformer or of several components."
    )
    t5_tokenizer: InputFolder | None = Field(
        None, description="Folder of another T5 tokenizer. The text conditioner reads its tokens."
    )


SPEC = FamilySpec(
    name="anima",
    title="Anima",
    model_section=AnimaSection,
    objective_section=FlowSection,
    implementation="lora_rocm.families.anima.family:Anima",
    component="transformer",
    axes=image_axes(multiple=16, per_token=16),
    guidance=4.0,
    fp16="products",
    metadata=FileMetadata(
        base_version="anima",
        architecture="anima/lora",
        implementation="https://huggingface.co/circlestone-labs/Anima",
    ),
)
