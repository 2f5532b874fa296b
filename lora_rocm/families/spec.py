"""The specification of a model family for the light half. Each family's ``spec.py`` makes one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from lora_rocm.recipe.rule import RecipeRule
from lora_rocm.recipe.sections import InputFolder, ModelSection, ObjectiveSection, PathOrHubId, Quantization
from lora_rocm.recipe.source_sections import OF_TEXTS_TOO, OF_VIDEOS, DataSource


class LatentSection(ModelSection):
    """A base with a VAE."""

    part_keys: ClassVar[tuple[str, ...]] = ("vae",)

    vae: PathOrHubId | None = Field(None, description="Another VAE: a diffusers folder or a single .safetensors file.")

    def metadata(self) -> Mapping[str, object]:
        return {"ss_vae_name": Path(self.vae).name if self.vae else None}


class CheckpointSection(LatentSection):
    """A base that is a diffusers folder or a one-file checkpoint, trained by discrete-time diffusion."""

    may_inpaint: ClassVar[bool] = True

    config: InputFolder | None = Field(
        None, description="Folder with the diffusers configs and tokenizers for a single-file checkpoint."
    )
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = Field(
        "auto", description="The kind of prediction; auto reads the model's own scheduler config."
    )
    max_token_length: Literal[75, 150, 225] = Field(
        225,
        description="Maximum number of tokens that the text encoders read of a caption or prompt, in chunks of 75 "
        "as in ComfyUI. Further tokens are cut off.",
    )

    @property
    def configs(self) -> str | None:
        return self.config

    def metadata(self) -> Mapping[str, object]:
        return {**super().metadata(), "ss_max_token_length": self.max_token_length}


class TransformerSection(LatentSection):
    """A base that is a diffusers folder, or a file of the transformer and perhaps of other components."""

    part_keys: ClassVar[tuple[str, ...]] = ("vae", "text_encoder", "tokenizer")

    text_encoder: PathOrHubId | None = Field(
        None,
        description="Another text encoder: a diffusers folder or a single .safetensors file. If "
        "name_or_path is a file of the transformer alone, name the other components here and in vae.",
    )
    tokenizer: InputFolder | None = Field(None, description="Folder of another tokenizer.")
    text_encoder_quantization: Quantization = Field(
        "none",
        description="As quantization, for the layers of the largest text encoder while captions are encoded. "
        "It changes the cached values.",
    )


OF_IMAGES = frozenset(
    [f"data.{name}" for name in DataSource.model_fields if name not in OF_TEXTS_TOO | OF_VIDEOS]
    + [
        f"data.{name}"
        for name in (
            *("bucket_step", "bucket_max_aspect", "enable_bucket", "upscale", "caption_variants"),
            *("normalize_masked_area_loss", "prior_loss_weight"),
        )
    ]
    + [
        f"sample.{name}"
        for name in (
            *("width", "height", "control_images", "control_images_2", "masks", "images_per_prompt", "sampler"),
            *("guidance_scale", "negative_prompt"),
        )
    ]
)
"""Keys of shared sections about images: a family that trains on texts reads none of them."""
OF_TEXTS = frozenset({"data.max_length", "data.packing"})
"""Keys that are read only by families that train on texts."""
SampleKind = Literal["image", "text", "video"]
Fp16 = Literal["whole", "products", "never"]
"""The part that fits fp16: all activations, only the products (the residual stream is float32), or nothing."""
PreviewMedium = Literal["image", "text", "video"]


@dataclass(frozen=True)
class Axis:
    """One axis of a sample's shape. Lengths are given in ``unit``.

    Attributes:
        name: as in ``dataset.shape.Shape``.
        unit: "px", "frames" or "tokens".
        multiple: valid lengths are ``first`` plus a multiple of this.
        first: 0, or 1 where the first frame is encoded alone.
        per_latent: units per position of the latents.
        per_token: units per position of the model's sequence.
        longest: maximum length of a sample; 0: the recipe sets it.
    """

    name: str
    unit: str = "px"
    multiple: int = 1
    first: int = 0
    per_latent: int = 1
    per_token: int = 1
    longest: int = 0

    @property
    def lengths(self) -> str:
        """The valid lengths in words: "multiples of 32", "1 and multiples of 4 more"."""
        return f"{self.first} and multiples of {self.multiple} more" if self.first else f"multiples of {self.multiple}"

    def fits(self, length: int) -> bool:
        return length >= max(self.first, 1) and (length - self.first) % self.multiple == 0

    def nearest(self, length: int) -> tuple[int, ...]:
        """The valid lengths around an invalid one: the next smaller (if there is one) and the next larger."""
        steps = (length - self.first) // self.multiple
        return tuple(found for n in (steps, steps + 1) if self.fits(found := self.first + n * self.multiple))

    def latents(self, length: int) -> int:
        return self.first + (length - self.first) // self.per_latent

    def tokens(self, length: int) -> int:
        return self.first + (length - self.first) // self.per_token


@dataclass(frozen=True)
class Axes:
    """The axes that a family's samples have, the lengths that it accepts, and their cost in tokens."""

    axes: tuple[Axis, ...]

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __getitem__(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def __contains__(self, name: object) -> bool:
        return any(axis.name == name for axis in self.axes)

    @property
    def multiple_px(self) -> int:
        """The number of pixels that every side of an image is a multiple of; 1 if the family reads no images."""
        return math.lcm(*(axis.multiple for axis in self.axes if axis.unit == "px"))

    def tokens(self, lengths: Sequence[int]) -> int:
        """The length of the model's sequence for a sample with these lengths, one per axis. It measures the cost."""
        return math.prod(axis.tokens(length) for axis, length in zip(self.axes, lengths, strict=True))


def image_axes(multiple: int, per_token: int) -> Axes:
    """The axes of images with sides that are multiples of ``multiple``, for a VAE with eight pixels per latent."""
    return Axes(tuple(Axis(name, multiple=multiple, per_latent=8, per_token=per_token) for name in "hw"))


@dataclass(frozen=True)
class FileMetadata:
    """A family's entries in the metadata of a LoRA file. A field with an empty string is omitted.

    Attributes:
        base_version: kohya's ``ss_base_model_version``.
        architecture: ``modelspec.architecture`` of Stability's modelspec.
        implementation: ``modelspec.implementation``, a URL.
        extra: further ``ss_`` fields.
        rate, text_rate: fields for the learning rates of the main component and of the text encoders.
    """

    base_version: str = ""
    architecture: str = ""
    implementation: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    rate: str = "ss_unet_lr"
    text_rate: str = "ss_text_encoder_lr"


@dataclass(frozen=True)
class Evidence:
    """Evidence of a family in a base model and a LoRA, read before anything is loaded: values of ``model.family``.

    Attributes:
        base: the possible families of the base; empty if it is not recognised.
        lora: likewise of the LoRA.
    """

    base: Collection[str] = ()
    lora: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """A model family as the light half sees it. Specs are compared by identity.

    Attributes:
        name: the value of ``model.family``.
        title: name for people.
        model_section: the class of the recipe's ``model`` section.
        objective_section: the class of the recipe's ``objective`` section.
        implementation: "module:Class" of its ``families.base.ModelFamily``, imported on demand.
        component: name of the component that is always trained.
        axes: the axes of its samples.
        text_components: components that ``lora.train_text_encoder`` also trains; (): the key is refused.
        embedding_keys: text component -> name of its tensor in embedding files; empty: ``lora.new_tokens`` is refused.
        samples: the kinds of samples that it trains on.
        preview: the medium of previews.
        guidance: usual guidance scale of previews.
        samplers: the values of ``sample.sampler`` that previews can be drawn with.
        unread: dotted keys of shared sections that it does not read, including keys for other kinds of samples. A
            recipe that sets one is refused.
        formats: the values of ``output.formats`` in which its results can be written, the default first.
        conversions: further formats, which only ``lora-rocm export`` writes.
        fp16: whether its activations fit fp16, see ``Fp16``.
        trains_norms: whether ``lora.train_norms`` is supported; other programs then read the norms from the LoRA file.
        metadata: entries of its LoRA files' metadata.
        rules: rules over several keys that apply to this family only.
    """

    name: str
    title: str
    model_section: type[ModelSection]
    objective_section: type[ObjectiveSection]
    implementation: str
    component: str
    axes: Axes
    text_components: tuple[str, ...] = ()
    embedding_keys: Mapping[str, str] = field(default_factory=dict)
    samples: tuple[SampleKind, ...] = ("image",)
    preview: PreviewMedium = "image"
    guidance: float = 6.0
    samplers: tuple[str, ...] = ("euler",)
    unread: frozenset[str] = frozenset()
    fp16: Fp16 = "whole"
    trains_norms: bool = False
    metadata: FileMetadata = FileMetadata()
    formats: tuple[str, ...] = ("kohya", "sd-scripts", "comfyui", "diffusers", "peft")
    conversions: tuple[str, ...] = ()
    rules: tuple[RecipeRule, ...] = ()

    def __post_init__(self) -> None:
        frames = frozenset() if "frames" in self.axes else frozenset({"data.frames"})
        norms = frozenset() if self.trains_norms else frozenset({"lora.train_norms"})
        object.__setattr__(
            self, "unread", self.unread | norms | frames | (OF_IMAGES if self.trains_on_texts else OF_TEXTS)
        )

    @property
    def takes_fp16(self) -> bool:
        """Whether it can be trained in fp16."""
        return self.fp16 != "never"

    @property
    def trains_on_texts(self) -> bool:
        """Whether samples are texts instead of images or videos with captions."""
        return self.samples[0] == "text"

    def reads(self, key: str) -> bool:
        """Whether the family reads a dotted key of the shared sections, such as "data.resolution"."""
        return key not in self.unread
