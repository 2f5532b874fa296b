"""Families that exist for tests alone, as the light half knows them: for text, videos, images, edited images.

The heavy half of each is in ``tests/families/toys``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import Axes, Axis, FamilySpec, FileMetadata, image_axes
from lora_rocm.recipe.sections import InputFolder, ModelSection, ObjectiveSection


class ToyTextSection(ModelSection):
    """The base model. A language model for tests."""

    family: Literal["toy-text"] = Field("toy-text", description="Model family.")
    tokenizer: InputFolder | None = Field(None, description="Folder of another tokenizer.")


class NextTokenSection(ObjectiveSection):
    """The target of training: the next token."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of every other token in the target.")


class ToyFlowSection(ModelSection):
    """The base model. A transformer for images, for tests."""

    family: Literal["toy-flow"] = Field("toy-flow", description="Model family.")


class ToyEditSection(ModelSection):
    """The base model. A transformer that edits images by two control images, for tests."""

    control_keys: ClassVar[Mapping[str, str]] = {}
    max_controls: ClassVar[int] = 2
    controls_keep_size: ClassVar[bool] = True

    family: Literal["toy-edit"] = Field("toy-edit", description="Model family.")


class ToyVideoSection(ModelSection):
    """The base model. A video model for tests."""

    family: Literal["toy-video"] = Field("toy-video", description="Model family.")


class FlowSection(ObjectiveSection):
    """The target of training: the velocity of a flow."""

    shift: float = Field(1.0, gt=0, description="Of the noise levels.")


TOY_TEXT = FamilySpec(
    name="toy-text",
    title="Toy text",
    model_section=ToyTextSection,
    objective_section=NextTokenSection,
    implementation="tests.families.toys.llama_like:LlamaLike",
    component="model",
    axes=Axes((Axis("tokens", unit="tokens", multiple=16, longest=96),)),
    samples=("text",),
    preview="text",
    formats=("peft",),
)
TOY_VIDEO = FamilySpec(
    name="toy-video",
    title="Toy video",
    model_section=ToyVideoSection,
    objective_section=FlowSection,
    implementation="tests.families.toys.wan_like:WanLike",
    component="transformer",
    axes=Axes(
        (
            Axis("frames", unit="frames", multiple=4, first=1, per_latent=4, per_token=4),
            Axis("h", multiple=32, per_latent=16, per_token=32),
            Axis("w", multiple=32, per_latent=16, per_token=32),
        )
    ),
    samples=("video", "image"),
    preview="video",
    metadata=FileMetadata(base_version="toy_video_v1"),
)
TOY_FLOW = FamilySpec(
    name="toy-flow",
    title="Toy flow",
    model_section=ToyFlowSection,
    objective_section=FlowSection,
    implementation="tests.families.toys.flux_like:FluxLike",
    component="transformer",
    axes=image_axes(multiple=16, per_token=16),
    metadata=FileMetadata(base_version="toy_flow_v1"),
)
TOY_EDIT = FamilySpec(
    name="toy-edit",
    title="Toy edit",
    model_section=ToyEditSection,
    objective_section=FlowSection,
    implementation="tests.families.toys.edit_like:EditLike",
    component="transformer",
    axes=image_axes(multiple=16, per_token=16),
    metadata=FileMetadata(base_version="toy_edit_v1"),
)
TOYS = FamilyRegistry([*FAMILIES, TOY_TEXT, TOY_VIDEO, TOY_FLOW, TOY_EDIT])
