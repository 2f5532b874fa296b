"""The specification of FLUX.1, importable without torch: recipe section, names and recognition marks."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from lora_rocm.families.spec import FamilySpec, FileMetadata, TransformerSection, image_axes
from lora_rocm.recipe.sections import MAX_GUIDANCE, FlowSection, InputFolder, PathOrHubId


class FluxSection(TransformerSection):
    """The base model. FLUX.1 and its fine-tunes."""

    part_keys: ClassVar[tuple[str, ...]] = (*TransformerSection.part_keys, "text_encoder_2", "tokenizer_2")
    control_keys = MappingProxyType({"variant": "kontext"})

    family: Literal["flux"] = Field("flux", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(
        description="A diffusers folder, a hub id, or a .safetensors file of the transformer or of several components."
    )
    variant: Literal["dev", "schnell", "kontext"] = Field(
        "dev",
        description="The FLUX.1 variant. Files do not always identify it. schnell is distilled, so training "
        "on dev is better.",
    )
    guidance: float = Field(
        1.0,
        ge=0.0,
        le=MAX_GUIDANCE,
        description="The guidance scale that the model gets as input in training (schnell has no such "
        "input). 1 is usual, even if the LoRA is used at 3.5; diffusers' scripts use 3.5.",
    )
    text_encoder_2: PathOrHubId | None = Field(
        None, description="Another T5-XXL, in the same formats as text_encoder, which is CLIP-L."
    )
    tokenizer_2: InputFolder | None = Field(None, description="Folder of another T5 tokenizer.")


SPEC = FamilySpec(
    name="flux",
    title="FLUX.1",
    model_section=FluxSection,
    objective_section=FlowSection,
    implementation="lora_rocm.families.flux.family:Flux",
    component="transformer",
    axes=image_axes(multiple=16, per_token=16),
    guidance=3.5,
    fp16="products",
    unread=frozenset({"sample.negative_prompt"}),
    metadata=FileMetadata(
        base_version="flux1",
        architecture="flux-1-dev/lora",
        implementation="https://github.com/black-forest-labs/flux",
    ),
)
