"""Field types and limits of recipe sections, and the sections that families build on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

T = TypeVar("T")
MAX_STEPS = 100_000_000
MAX_EPOCHS = 1_000_000
MAX_BATCH = 4096
MAX_RANK = 2048
MAX_SIDE_PX = 16_384
MAX_BUCKET_STEP = 1024
MAX_RESOLUTIONS = 16
MAX_ENDINGS = 16
MAX_FRAMES = 10_000
MAX_VIEWS = 64
MAX_TAGS = 1000
MAX_TOKENS = 1 << 20
NUM_TIMESTEPS = 1000  # the number of noise levels of a base model
MAX_SAMPLE_STEPS = NUM_TIMESTEPS
MAX_GUIDANCE = 1000.0
MAX_WORKERS = 256
MAX_TIMEOUT_S = 604_800.0  # a week
MAX_ITEMS = 1000  # in a list
Sampler = Literal["euler", "euler_a", "heun", "dpmpp_2m", "dpmpp_2m_karras", "ddim", "ddpm", "unipc"]
ALL_SAMPLERS: tuple[str, ...] = get_args(Sampler)
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Resolution = Annotated[int, Field(gt=0, le=MAX_SIDE_PX)]


LIST_TAG = "list"
"""The part of a pydantic error location that means the list variant of a field, which takes one value or several."""


def _kind_of_value(value: object) -> str:
    return LIST_TAG if isinstance(value, list | tuple) else "one"


def _no_twins(values: tuple[T, ...]) -> tuple[T, ...]:
    twins = [value for number, value in enumerate(values) if value in values[:number]]
    if twins:
        context = {"what": f"has {twins[0]} twice", "at": [], "fix": "Remove one of them."}
        raise PydanticCustomError("rule", "{what}", context)
    return values


Resolutions = Annotated[
    Annotated[Resolution, Tag("one")]
    | Annotated[
        tuple[Resolution, ...],
        Field(min_length=1, max_length=MAX_RESOLUTIONS),
        AfterValidator(_no_twins),
        Tag(LIST_TAG),
    ],
    Discriminator(_kind_of_value),  # so that an error names only the variant that the user wrote
]
"""One resolution, or a list of distinct ones."""


def caption_endings(extension: str | Sequence[str]) -> tuple[str, ...]:
    """Return the endings of caption file names in lower case.

    A dot is prepended unless they start with a dot or underscore.
    """
    given = (extension,) if isinstance(extension, str) else extension
    return tuple(each.lower() if each.startswith("_") else "." + each.lower().lstrip(".") for each in given)


def _different_endings(given: tuple[str, ...]) -> tuple[str, ...]:
    _no_twins(caption_endings(given))
    return given


CaptionExtension = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=1, max_length=MAX_ENDINGS),
        AfterValidator(_different_endings),
        Tag(LIST_TAG),
    ],
    Discriminator(_kind_of_value),
]
"""The ending of caption file names, or a list of distinct ones."""
Batch = Annotated[int, Field(gt=0, le=MAX_BATCH)]
Crops = bool | Annotated[int, Field(gt=0, le=MAX_VIEWS)]
Colours = Annotated[int, Field(ge=0, le=MAX_VIEWS)]
Tags = Annotated[int, Field(ge=0, le=MAX_TAGS)]
Weight = Annotated[float, Field(gt=0.0, le=1000.0)]
Repeats = Annotated[int, Field(gt=0, le=10_000)]
Quantization = Literal["none", "int8", "fp8", "nf4"]
Compute = Literal["bf16", "fp8", "int8"]
PathText = Annotated[str, Field(min_length=1)]  # an empty path would mean the current folder


@dataclass(frozen=True)
class PathRule:
    """The treatment of a path in a recipe.

    Attributes:
        absolute: when the path is made absolute, because the worker and a later resume run in other folders. "if there"
            keeps a hub id unchanged, "unless builtin" a built-in name.
        must_be: the kind of file that has to exist before a run; empty if none has to, or if it is checked later.
        words: values that are not paths.
    """

    absolute: Literal["always", "unless builtin", "if there"]
    must_be: Literal["folder", "file", ""] = ""
    words: tuple[str, ...] = ()

    @property
    def is_output(self) -> bool:
        """Whether the program creates this folder and writes to it. It only reads all other paths of a recipe."""
        return self.absolute == "always"


InputFolder = Annotated[PathText, PathRule("unless builtin", "folder")]
BESIDE = "beside"
FolderOrBeside = Annotated[PathText, PathRule("unless builtin", "folder", words=(BESIDE,))]
"""A folder, or ``BESIDE`` if the files are next to the images and named as other trainers do."""
Frames = Annotated[int, Field(gt=0, le=MAX_FRAMES)]
Lengths = Annotated[
    Annotated[Frames, Tag("one")]
    | Annotated[
        tuple[Frames, ...], Field(min_length=1, max_length=MAX_RESOLUTIONS), AfterValidator(_no_twins), Tag(LIST_TAG)
    ],
    Discriminator(_kind_of_value),
]
"""One frame count, or a list of distinct ones."""
MAX_CONTROLS = 8
ControlPath = Annotated[
    Annotated[FolderOrBeside, Tag("one")]
    | Annotated[tuple[FolderOrBeside, ...], Field(min_length=1, max_length=MAX_CONTROLS), Tag(LIST_TAG)],
    Discriminator(_kind_of_value),
]
"""Places of control images: one folder with one control image per image, or a list of such folders."""
Columns = Annotated[
    Annotated[PathText, Tag("one")]
    | Annotated[
        tuple[PathText, ...], Field(min_length=1, max_length=MAX_CONTROLS), AfterValidator(_no_twins), Tag(LIST_TAG)
    ],
    Discriminator(_kind_of_value),
]
"""A table's column, or a list of distinct columns."""
InputFile = Annotated[PathText, PathRule("unless builtin", "file")]
PathOrHubId = Annotated[PathText, PathRule("if there")]
OutputFolder = Annotated[PathText, PathRule("always")]


@dataclass(frozen=True)
class AddedLater:
    """Marks a key that was added after 2026-11-27. Recipes of earlier runs do not have it (see ``comparison``)."""


def path_rule(field: FieldInfo) -> PathRule | None:
    """Return the path rule of a field, or None if the field is not a path."""
    return next(
        (rule for rule in (*field.metadata, *_metadata_in(field.annotation)) if isinstance(rule, PathRule)), None
    )


def _metadata_in(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        yield from _metadata_in(part)


def on_resume(default: Any, description: str, **limits: Any) -> Any:
    """Return a field that may change when a run is resumed, such as the number of steps, previews or outputs."""
    return Field(default, description=description, json_schema_extra={"resume": "may change"}, **limits)


class Section(BaseModel):
    """Base class of all sections. Unknown keys are refused, and values cannot be changed.

    above_limit: advice for a value above a key's limit, by key. It replaces the key's description as the fix.
    """

    above_limit: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # a recipe needs only one of many optimizers and adapters
    )


class ModelSection(Section):
    """The base model.

    Attributes:
        part_keys: keys that load a component or tokenizer from elsewhere. Each is named like the part that it loads.
        control_keys: keys and values that a base with control images must have, or None if the family has no such base.
        max_controls: largest number of control images per image.
        controls_keep_size: whether a control image is encoded in its own bucket, not in its image's bucket.
        may_inpaint: whether the family has inpainting bases. Previews with such a base take control images with masks.
    """

    part_keys: ClassVar[tuple[str, ...]] = ()
    control_keys: ClassVar[Mapping[str, str] | None] = None
    max_controls: ClassVar[int] = 1
    controls_keep_size: ClassVar[bool] = False
    may_inpaint: ClassVar[bool] = False

    family: str = Field(description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(description="The base model: a folder, a file or a hub id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    quantization: Quantization = Field(
        "none",
        description="Format of the frozen linear layers in the blocks: half (int8, fp8) or a quarter (nf4) of the "
        "memory of bf16. Steps are slower and weights less exact.",
    )
    compute: Annotated[Compute, AddedLater()] = Field(
        "bf16",
        description="Products with the frozen layers: bf16 (or the run's precision), or in the eight bits of "
        "quantization, which must be the same. Inputs and gradients are then rounded to eight bits, too: faster on a "
        "few GPUs, and less exact. It needs runtime.profile: fast.",
    )

    training_adapter: InputFile | None = Field(
        None,
        description="A LoRA file that is active during training but not trained; previews and results do not have it. "
        "For bases distilled to few steps: their training adapter undoes the distillation.",
    )

    @property
    def parts(self) -> Mapping[str, str]:
        """Components and tokenizers that are loaded from elsewhere: a file or folder for each name."""
        return {key: value for key in self.part_keys if (value := getattr(self, key)) is not None}

    @property
    def configs(self) -> str | None:
        """Folder with the configs and tokenizers of a single-file checkpoint, or None."""
        return None

    @property
    def takes_control(self) -> bool:
        """Whether the model takes control images."""
        keys = self.control_keys
        return keys is not None and all(getattr(self, key) == value for key, value in keys.items())

    @property
    def for_control(self) -> str:
        """The entries of ``control_keys`` as a user writes them in a recipe."""
        return ", ".join(f"model.{key}: {value}" for key, value in (self.control_keys or {}).items())

    def metadata(self) -> Mapping[str, object]:
        """Return kohya's ``ss_`` fields for these keys, for a LoRA file's metadata.

        A field with the value None is omitted.
        """
        return {}


class ObjectiveSection(Section):
    """The training objective. Its keys depend on the family."""

    @property
    def compares_pairs(self) -> bool:
        """Whether each sample is a pair of a preferred and a rejected answer."""
        return False

    @property
    def watching(self) -> ObjectiveSection:
        """The objective with which the loss on the samples of ``data.watched`` is measured."""
        return self

    def metadata(self) -> Mapping[str, object]:
        """Return kohya's ``ss_`` fields for these keys, for a LoRA file's metadata.

        A field with the value None is omitted.
        """
        return {}


class DenoisingSection(ObjectiveSection):
    """The keys of all denoising objectives. Timesteps range from 0 (the image) to 1000 (noise)."""

    timestep_sampling: Literal["logit-normal", "uniform"] = Field(
        "uniform",
        description="Distribution of the noise levels. logit-normal is the sigmoid of a normal number with logit_mean "
        "and logit_std.",
    )
    logit_mean: float = Field(
        0.0,
        ge=-10.0,
        le=10.0,
        description="Above 0: more noise; below 0: less. The scripts of diffusers use the opposite sign.",
    )
    logit_std: float = Field(
        1.0, gt=0, le=10.0, description="Spread of the logit-normal distribution (sigmoid_scale elsewhere)."
    )
    min_timestep: int = Field(
        0,
        ge=0,
        lt=NUM_TIMESTEPS,
        description="Lowest noise level in training, in thousandths. The distribution is scaled to the range.",
    )
    max_timestep: int = Field(
        NUM_TIMESTEPS, gt=0, le=NUM_TIMESTEPS, description="Highest noise level in training, in thousandths."
    )
    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = Field(
        "l2",
        description="Loss of the error of a prediction: its square (l2), its absolute value (l1), or pseudo-Huber, "
        "which is l2 for small errors and l1 for large ones. smooth_l1 is huber divided by its threshold.",
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "snr",
        description="Threshold of huber and smooth_l1. constant: huber_c at all noise levels. exponential, snr: from 1 "
        "without noise down to huber_c, by the timestep or by the signal-to-noise ratio.",
    )
    huber_c: float = Field(0.1, gt=0, le=1000.0, description="Lowest threshold of huber and smooth_l1.")
    huber_scale: float = Field(
        1.0, gt=0, le=1000.0, description="Factor of the threshold; not with huber_schedule: snr."
    )

    noise_offset: float = Field(
        0.0, ge=0, le=10.0, description="Per-channel offset added to the noise; 0 off, 0.05 usual."
    )
    adaptive_noise_scale: float = Field(
        0.0,
        ge=-10.0,
        le=10.0,
        description="Added to noise_offset, times the absolute mean of each channel of the image's latents.",
    )
    multires_noise_iterations: int = Field(
        0, ge=0, le=100, description="Most resolutions of multi-resolution (pyramid) noise; 0 off, 6 to 10 usual."
    )
    multires_noise_discount: float = Field(
        0.3, ge=0, le=1, description="Strength of each resolution of that noise, relative to the next finer one."
    )
    ip_noise_gamma: float = Field(
        0.0,
        ge=0,
        le=10.0,
        description="Input perturbation (arXiv 2301.11706): more noise in the model's input than in the target; 0 off, "
        "0.1 usual.",
    )

    def metadata(self) -> Mapping[str, object]:
        huber = self.loss_type in ("huber", "smooth_l1")
        return {
            "ss_loss_type": None if self.loss_type == "l2" else self.loss_type,
            "ss_huber_schedule": self.huber_schedule if huber else None,
            "ss_huber_c": self.huber_c if huber else None,
            "ss_huber_scale": self.huber_scale if huber else None,
            "ss_noise_offset": self.noise_offset or None,
            "ss_adaptive_noise_scale": self.adaptive_noise_scale or None,
            "ss_multires_noise_iterations": self.multires_noise_iterations or None,
            "ss_multires_noise_discount": self.multires_noise_discount if self.multires_noise_iterations else None,
            "ss_ip_noise_gamma": self.ip_noise_gamma or None,
        }


class DdpmSection(DenoisingSection):
    """The training objective of discrete-time diffusion: predict the noise or the velocity."""

    min_snr_gamma: float = Field(
        0.0, ge=0, le=1000.0, description="Min-SNR loss weighting (arXiv 2303.09556); 0 off, 5 usual."
    )
    soft_min_snr_gamma: float = Field(
        0.0,
        ge=0,
        le=1000.0,
        description="Soft Min-SNR loss weighting (arXiv 2401.11605), in place of min_snr_gamma; 0 off, 4 usual.",
    )
    debiased_estimation_loss: bool = Field(
        False, description="Divide the loss by the root of the SNR (arXiv 2310.08442), for velocities by SNR + 1."
    )
    v_pred_like_loss: float = Field(
        0.0, ge=0, le=1000.0, description="Add the loss of the velocity, times this; for noise predictions."
    )
    scale_v_pred_loss_like_noise_pred: bool = Field(
        False, description="Scale the velocity loss to the scale of the noise loss; for velocity predictions."
    )
    zero_terminal_snr: bool = Field(
        False,
        description="Rescale the noise schedule to zero terminal SNR (arXiv 2305.08891). Min-SNR weights use the "
        "rescaled schedule, as in diffusers; kohya uses the original one, which changes gradients by 2 to 10 %.",
    )

    def metadata(self) -> Mapping[str, object]:
        return {
            **super().metadata(),
            "ss_min_snr_gamma": self.min_snr_gamma or None,
            "ss_debiased_estimation": self.debiased_estimation_loss or None,
            "ss_zero_terminal_snr": self.zero_terminal_snr,
        }


class FlowSection(DenoisingSection):
    """The training objective of flow matching: predict the velocity from the image to the noise.

    The noise level sigma is 0 for the image and 1 for noise.
    """

    timestep_sampling: Literal["logit-normal", "uniform"] = Field(
        "logit-normal",
        description="Distribution of the noise levels before the shift. logit-normal is the sigmoid of a normal number "
        "with logit_mean and logit_std.",
    )
    shift: Literal["auto", "resolution"] | Annotated[float, Field(gt=0, le=1000.0)] = Field(
        "auto",
        description="Above 1: more noise. A number, resolution (grows with the image's tokens), or auto (the value in "
        "the base's scheduler config). Previews always use auto.",
    )
