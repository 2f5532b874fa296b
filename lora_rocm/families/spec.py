"""The specification of a model family, importable without torch. Each family's ``spec.py`` defines one."""

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
        "auto", description="The predicted quantity; auto reads it from the model's own scheduler config."
    )
    max_token_length: Literal[75, 150, 225] = Field(
        225,
        description="Maximum number of tokens of a caption or prompt that the text encoders read, in chunks "
        "of 75 as in ComfyUI. Further tokens are cut off.",
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
        description="Like quantization, but for the largest text encoder's layers while captions are "
        "encoded. It changes the cached values.",
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
"""Keys of shared sections that only concern images. Families that train on texts do not read them."""
OF_TEXTS = frozenset({"data.max_length", "data.packing"})
"""Keys of shared sections that only concern texts. Other families do not read them."""
SampleKind = Literal["image", "text", "video"]
Fp16 = Literal["whole", "products", "never"]
"""The part of a model that can run in fp16: everything ("whole"), only matrix products with a float32 residual stream
("products"), or nothing ("never").
"""
PreviewMedium = Literal["image", "text", "video"]


@dataclass(frozen=True)
class Axis:
    """One axis of a sample's shape. Lengths are measured in ``unit``.

    Attributes:
        name: name of the axis in ``dataset.shape.SampleShape``.
        unit: "px", "frames" or "tokens".
        multiple: valid lengths are ``first`` plus a multiple of this number.
        first: 1 if the first frame is encoded alone, else 0.
        per_latent: units per position of the latents.
        per_token: units per position of the model's sequence.
        longest: maximum length of a sample, or 0 if the recipe sets it.
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
        """Return the nearest valid lengths for an invalid one: the next smaller, if it exists, and the next larger."""
        steps = (length - self.first) // self.multiple
        return tuple(found for n in (steps, steps + 1) if self.fits(found := self.first + n * self.multiple))

    def latents(self, length: int) -> int:
        return self.first + (length - self.first) // self.per_latent

    def tokens(self, length: int) -> int:
        return self.first + (length - self.first) // self.per_token


@dataclass(frozen=True)
class Axes:
    """The axes of a family's samples, with their valid lengths and the resulting number of tokens."""

    axes: tuple[Axis, ...]

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __getitem__(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def __contains__(self, name: object) -> bool:
        return any(axis.name == name for axis in self.axes)

    @property
    def multiple_px(self) -> int:
        """Every side of an image is a multiple of this number of pixels. It is 1 if the family reads no images."""
        return math.lcm(*(axis.multiple for axis in self.axes if axis.unit == "px"))

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the sequence length for a sample with these lengths, one per axis. It measures the computing cost."""
        return math.prod(axis.tokens(length) for axis, length in zip(self.axes, lengths, strict=True))


def image_axes(multiple: int, per_token: int) -> Axes:
    """Return the axes of images with sides that are multiples of ``multiple``, for a VAE with 8 pixels per latent."""
    return Axes(tuple(Axis(name, multiple=multiple, per_latent=8, per_token=per_token) for name in "hw"))


@dataclass(frozen=True)
class FileMetadata:
    """A family's entries in the metadata of a LoRA file. Empty entries are omitted.

    Attributes:
        base_version: value of kohya's ``ss_base_model_version``.
        architecture: value of ``modelspec.architecture`` (Stability's modelspec).
        implementation: value of ``modelspec.implementation``, a URL.
        extra: additional ``ss_`` entries.
        rate, text_rate: names of the entries for the learning rates of the main component and of the text encoders.
    """

    base_version: str = ""
    architecture: str = ""
    implementation: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    rate: str = "ss_unet_lr"
    text_rate: str = "ss_text_encoder_lr"


@dataclass(frozen=True)
class Evidence:
    """Possible families of a base model and a LoRA, as values of ``model.family``.

    They are read from headers and configs, before anything is loaded.

    Attributes:
        base: possible families of the base, empty if it is not recognised.
        lora: possible families of the LoRA, empty if it is not recognised.
    """

    base: Collection[str] = ()
    lora: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """A model family without its torch code. Specs are compared by identity.

    Attributes:
        name: the value of ``model.family``.
        title: name of the family in messages.
        model_section: the class of the recipe's ``model`` section.
        objective_section: the class of the recipe's ``objective`` section.
        implementation: the class that implements ``families.base.ModelFamily``, as "module:Class". It is imported on
            demand.
        component: name of the component that is always trained.
        axes: the axes of the family's samples.
        text_components: components that ``lora.train_text_encoder`` also trains. If there are none, the key is refused.
        embedding_keys: name of the tensor in embedding files by text component. If empty, ``lora.new_tokens`` is
            refused.
        samples: the kinds of samples that the family trains on.
        preview: the medium of previews.
        guidance: usual guidance scale of previews.
        samplers: values of ``sample.sampler`` that are supported.
        unread: dotted keys of shared sections that the family does not read, including keys for other kinds of samples.
            A recipe that sets one of them is refused.
        formats: supported values of ``output.formats``, the default first.
        conversions: additional formats, which only ``lora-rocm export`` writes.
        fp16: the part of the model that can run in fp16, see ``Fp16``.
        head_widths: widths of a head for which a start tests attention (``checks.attention_routes.SHAPES``). A new
            machine needs a second for each width, so a family may list the widths of its published base.
        trains_norms: whether ``lora.train_norms`` is supported. Other programs can then read the norms from the LoRA
            file.
        metadata: metadata entries of the family's LoRA files.
        rules: rules over several keys that apply only to this family.
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
    head_widths: tuple[int, ...] = (64, 128)
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
        """Whether the family can be trained in fp16."""
        return self.fp16 != "never"

    @property
    def trains_on_texts(self) -> bool:
        """Whether samples are texts, and not images or videos with captions."""
        return self.samples[0] == "text"

    def reads(self, key: str) -> bool:
        """Whether the family reads a dotted key of the shared sections, such as "data.resolution"."""
        return key not in self.unread
