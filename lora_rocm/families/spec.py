"""What the light half knows of a model family, as a value: a family's ``spec.py`` makes one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from lora_rocm.recipe.sections import InputFolder, ModelSection, ObjectiveSection, PathOrHubId


class CheckpointSection(ModelSection):
    """A base that is a diffusers folder or a one-file checkpoint, trained by discrete-time diffusion."""

    config: InputFolder | None = Field(
        None, description="Folder with the diffusers configs and tokenizers for a single-file checkpoint."
    )
    vae: PathOrHubId | None = Field(None, description="Another VAE: a diffusers folder or a single .safetensors file.")
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = Field(
        "auto", description="What the model predicts; auto reads the model's own scheduler config."
    )

    def metadata(self) -> Mapping[str, object]:
        return {"ss_vae_name": Path(self.vae).name if self.vae else None}


SampleKind = Literal["image", "text", "video"]
PreviewMedium = Literal["image", "text", "video"]


@dataclass(frozen=True)
class Axis:
    """One side of a sample.

    Attributes:
        name: as in ``data.shape.Shape``.
        unit: "px", "frames" or "tokens".
        multiple: lengths are ``first`` and a multiple of this more.
        first: 0, or 1 where a first frame stands alone.
        per_latent: so many units make one number of the latents.
        per_token: so many units make one position of the model's sequence.
        longest: no sample is longer; 0: the recipe says how long one can be.
    """

    name: str
    unit: str = "px"
    multiple: int = 1
    first: int = 0
    per_latent: int = 1
    per_token: int = 1
    longest: int = 0

    def fits(self, length: int) -> bool:
        return length >= max(self.first, 1) and (length - self.first) % self.multiple == 0

    def nearest(self, length: int) -> tuple[int, ...]:
        """The possible lengths around one that is not: the next smaller one if there is one, and the next larger."""
        steps = (length - self.first) // self.multiple
        return tuple(found for n in (steps, steps + 1) if self.fits(found := self.first + n * self.multiple))

    def latents(self, length: int) -> int:
        return self.first + (length - self.first) // self.per_latent

    def tokens(self, length: int) -> int:
        return self.first + (length - self.first) // self.per_token


@dataclass(frozen=True)
class ShapeRules:
    """Which shapes of samples a family takes, and what they cost."""

    axes: tuple[Axis, ...]

    def __getitem__(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def __contains__(self, name: object) -> bool:
        return any(axis.name == name for axis in self.axes)

    @property
    def multiple_px(self) -> int:
        """Pixels of which every side of an image is a multiple; 1 if the family reads no images."""
        return math.lcm(*(axis.multiple for axis in self.axes if axis.unit == "px"))

    def tokens(self, lengths: Sequence[int]) -> int:
        """Positions of the model's sequence for a sample of these lengths, one for each axis: what it costs."""
        return math.prod(axis.tokens(length) for axis, length in zip(self.axes, lengths, strict=True))


@dataclass(frozen=True)
class FileMetadata:
    """What a LoRA file says about its family. ``""``: the field is left out.

    Attributes:
        base_version: kohya's ``ss_base_model_version``.
        architecture: of Stability's modelspec.
        implementation: of Stability's modelspec, a URL.
        extra: further ``ss_`` fields.
        rate, text_rate: fields of the learning rates of what is always trained, and of the text encoders.
    """

    base_version: str = ""
    architecture: str = ""
    implementation: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    rate: str = "ss_unet_lr"
    text_rate: str = "ss_text_encoder_lr"


@dataclass(frozen=True)
class Evidence:
    """What is known of a base model and of a LoRA for it, before anything is loaded. All may be empty.

    Attributes:
        pipeline: ``_class_name`` of a diffusers folder.
        tensors: names in a one-file checkpoint.
        metadata: of the LoRA file.
    """

    pipeline: str = ""
    tensors: Collection[str] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Marks:
    """By what a family is recognised.

    Attributes:
        pipelines: starts of ``_class_name`` in a diffusers folder.
        tensors: each is a part of some tensor name of a one-file checkpoint.
        base_versions: starts of ``ss_base_model_version`` in the metadata of LoRA files.
        architectures: starts of ``modelspec.architecture`` there.
    """

    pipelines: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    base_versions: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()

    def base_is(self, seen: Evidence) -> bool:
        """Whether the base is of the family."""
        of_file = bool(self.tensors) and all(any(mark in name for name in seen.tensors) for mark in self.tensors)
        return of_file or seen.pipeline.startswith(self.pipelines)

    def lora_is_for(self, seen: Evidence) -> bool:
        """Whether the LoRA says that it is for the family."""
        version = seen.metadata.get("ss_base_model_version", "")
        architecture = seen.metadata.get("modelspec.architecture", "")
        return version.startswith(self.base_versions) or architecture.startswith(self.architectures)


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """A model family as everything but the heavy half sees it. Two of them are equal if they are the same object.

    Attributes:
        name: as ``model.family`` has it.
        title: for people.
        model_section: keys of ``model``.
        objective_section: keys of ``objective``.
        implementation: "module:Class" of its ``families.base.ModelFamily``; imported when it is needed.
        component: name of the component that is always trained.
        text_components: components that ``lora.train_text_encoder`` trains too; (): the key is refused.
        samples: kinds of sample that it trains on.
        shapes: which shapes of samples it takes.
        preview: what a preview is.
        unread: keys of shared sections, dotted, that it does not read; a recipe that gives one is refused.
        metadata: what its LoRA files say.
        marks: by what its base models and LoRA files are recognised.
    """

    name: str
    title: str
    model_section: type[ModelSection]
    objective_section: type[ObjectiveSection]
    implementation: str
    component: str
    shapes: ShapeRules
    text_components: tuple[str, ...] = ()
    samples: tuple[SampleKind, ...] = ("image",)
    preview: PreviewMedium = "image"
    unread: frozenset[str] = frozenset()
    metadata: FileMetadata = FileMetadata()
    marks: Marks = Marks()

    @property
    def trains_on_texts(self) -> bool:
        """Whether a sample is a text, and not something that has a caption."""
        return self.samples[0] == "text"

    def reads(self, key: str) -> bool:
        """Whether it reads a key of the shared sections, as "data.resolution"."""
        return key not in self.unread
