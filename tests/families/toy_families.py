"""Families that exist for tests alone: one for text and one for videos. Nothing heavy belongs to them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.families.spec import Axis, FamilySpec, FileMetadata, Marks, ShapeRules
from lora_rocm.recipe.sections import InputFolder, ModelSection, ObjectiveSection


class ToyTextSection(ModelSection):
    """The base model. A language model for tests."""

    family: Literal["toy-text"] = Field("toy-text", description="Model family.")
    tokenizer: InputFolder | None = Field(None, description="Folder of another tokenizer.")


class NextTokenSection(ObjectiveSection):
    """What the model is trained towards: the next token."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of every other token in the target.")


class ToyVideoSection(ModelSection):
    """The base model. A video model for tests."""

    family: Literal["toy-video"] = Field("toy-video", description="Model family.")


class FlowSection(ObjectiveSection):
    """What the model is trained towards: the velocity of a flow."""

    shift: float = Field(1.0, gt=0, description="Of the noise levels.")


TOY_TEXT = FamilySpec(
    name="toy-text",
    title="Toy text",
    model_section=ToyTextSection,
    objective_section=NextTokenSection,
    implementation="tests.families.toy_families:NOTHING",
    component="model",
    shapes=ShapeRules((Axis("tokens", unit="tokens"),)),
    samples=("text",),
    preview="text",
    unread=frozenset(
        {
            *("data.resolution", "data.flip_aug", "data.mask_path", "data.alpha_mask"),
            *("sample.width", "sample.height"),
        }
    ),
    marks=Marks(pipelines=("ToyText",)),
)
TOY_VIDEO = FamilySpec(
    name="toy-video",
    title="Toy video",
    model_section=ToyVideoSection,
    objective_section=FlowSection,
    implementation="tests.families.toy_families:NOTHING",
    component="transformer",
    shapes=ShapeRules(
        (
            Axis("frames", unit="frames", multiple=4, first=1, per_latent=4, per_token=4),
            Axis("h", multiple=32, per_latent=16, per_token=32),
            Axis("w", multiple=32, per_latent=16, per_token=32),
        )
    ),
    text_components=("text_encoder",),
    samples=("video", "image"),
    preview="video",
    metadata=FileMetadata(base_version="toy_video_v1"),
    marks=Marks(tensors=("blocks.0.", "patch_3d"), base_versions=("toy_video",), architectures=("toy-video",)),
)
TOYS = Registry([*PRODUCT, TOY_TEXT, TOY_VIDEO])
