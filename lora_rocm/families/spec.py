"""What the light half knows of a model family, as a value: a family's ``spec.py`` makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from lora_rocm.recipe.schema import ModelSection, ObjectiveSection, PathText


class CheckpointSection(ModelSection):
    """A base that is a diffusers folder or a one-file checkpoint, trained by discrete-time diffusion."""

    config: PathText | None = Field(
        None, description="Folder with the diffusers configs and tokenizers for a single-file checkpoint."
    )
    vae: PathText | None = Field(None, description="Another VAE: a diffusers folder or a single .safetensors file.")
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = Field(
        "auto", description="What the model predicts; auto reads the model's own scheduler config."
    )


@dataclass(frozen=True)
class FamilySpec:
    """A model family as everything but the heavy half sees it.

    Attributes:
        name: as ``model.family`` has it.
        title: for people.
        model_section: keys of ``model``.
        objective_section: keys of ``objective``.
        implementation: "module:Class" of its ``families.base.ModelFamily``.
    """

    name: str
    title: str
    model_section: type[ModelSection]
    objective_section: type[ObjectiveSection]
    implementation: str
