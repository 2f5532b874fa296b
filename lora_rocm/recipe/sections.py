"""Field types and limits of recipe sections, and the sections that families build on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    pass


MAX_STEPS = 100_000_000
MAX_EPOCHS = 1_000_000
MAX_BATCH = 4096
MAX_RANK = 2048
MAX_SIDE_PX = 16_384
MAX_BUCKET_STEP = 1024
MAX_TAGS = 1000
MAX_SAMPLE_STEPS = 1000  # the number of noise levels of a base model
MAX_GUIDANCE = 1000.0
MAX_WORKERS = 256
MAX_TIMEOUT_S = 604_800.0  # a week
MAX_ITEMS = 1000  # in a list
Sampler = Literal["euler", "euler_a", "heun", "dpmpp_2m", "dpmpp_2m_karras", "ddim", "unipc"]
ALL_SAMPLERS: tuple[str, ...] = get_args(Sampler)
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Resolution = Annotated[int, Field(gt=0, le=MAX_SIDE_PX)]
Batch = Annotated[int, Field(gt=0, le=MAX_BATCH)]
Tags = Annotated[int, Field(ge=0, le=MAX_TAGS)]
Repeats = Annotated[int, Field(gt=0, le=10_000)]
PathText = Annotated[str, Field(min_length=1)]  # an empty path would mean the current folder


@dataclass(frozen=True)
class PathRule:
    """Handling of a path in a recipe.

    Attributes:
        absolute: when it is made absolute, because the worker and a later resume run in other folders. "if there"
            leaves a hub id unchanged, "unless builtin" a built-in name.
        must_be: what has to exist before a run; "": nothing, or it is checked later.
    """

    absolute: Literal["always", "unless builtin", "if there"]
    must_be: Literal["folder", "file", ""] = ""


InputFolder = Annotated[PathText, PathRule("unless builtin", "folder")]
InputFile = Annotated[PathText, PathRule("unless builtin", "file")]
PathOrHubId = Annotated[PathText, PathRule("if there")]
OutputFolder = Annotated[PathText, PathRule("always")]


def path_rule(field: FieldInfo) -> PathRule | None:
    """The path rule of a field; None if the field holds no path."""
    return next(
        (rule for rule in (*field.metadata, *_metadata_in(field.annotation)) if isinstance(rule, PathRule)), None
    )


def _metadata_in(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        yield from _metadata_in(part)


def on_resume(default: Any, description: str, **limits: Any) -> Any:
    """A field whose value may change when a run is resumed (more steps, sample, output, runtime)."""
    return Field(default, description=description, json_schema_extra={"resume": "may change"}, **limits)


def one_of(section: BaseModel, first: str, second: str) -> PydanticCustomError:
    """The error if not exactly one of two keys is given. Its context lists the given keys for ``explain``."""
    given = [name for name in (first, second) if getattr(section, name)]
    fix = f"Remove one of them: {first} or {second}." if given else f"Add {first} or {second}."
    what = f"give exactly one of {first} and {second}"
    return PydanticCustomError("rule", "{what}", {"what": what, "keys": given, "fix": fix})


def not_both(first: str, second: str) -> PydanticCustomError:
    """The error if two keys are given of which one replaces the other."""
    what, fix = f"give only one of {first} and {second}", f"Remove one of them: {first} or {second}."
    return PydanticCustomError("rule", "{what}", {"what": what, "keys": [first, second], "fix": fix})


class Section(BaseModel):
    """Base class of all sections: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """The base model.

    Attributes:
        part_keys: the keys, named like components and tokenizers, that take these from elsewhere.
        control_keys: keys and their values with which a base takes control images; None: none of this family does.
    """

    part_keys: ClassVar[tuple[str, ...]] = ()
    control_keys: ClassVar[Mapping[str, str] | None] = None

    family: str = Field(description="Model family.")
    name_or_path: PathOrHubId = Field(description="The base model: a folder, a file or a hub id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    quantization: Literal["none", "int8", "fp8", "nf4"] = Field(
        "none",
        description="Format of the frozen linear layers in the blocks: a half (int8, fp8) or a quarter (nf4) of the "
        "memory of bf16, for a slower step and less exact weights.",
    )

    training_adapter: InputFile | None = Field(
        None,
        description="A LoRA file that takes part in training and is not trained; previews and results are without it. "
        "For bases distilled to few steps (Z-Image-Turbo, FLUX.1 schnell): their training adapter undoes that.",
    )

    @property
    def parts(self) -> Mapping[str, str]:
        """Components and tokenizers that are taken from elsewhere: name -> file or folder."""
        return {key: value for key in self.part_keys if (value := getattr(self, key)) is not None}

    @property
    def configs(self) -> str | None:
        """Folder of configs and tokenizers for a single-file checkpoint."""
        return None

    @property
    def takes_control(self) -> bool:
        """Whether the model takes control images."""
        keys = self.control_keys
        return keys is not None and all(getattr(self, key) == value for key, value in keys.items())

    @property
    def for_control(self) -> str:
        """``control_keys`` as a recipe has them."""
        return ", ".join(f"model.{key}: {value}" for key, value in (self.control_keys or {}).items())

    def metadata(self) -> Mapping[str, object]:
        """The ``ss_`` fields that kohya has for these keys, for the metadata of a LoRA file; None: left out."""
        return {}


class ObjectiveSection(Section):
    """The training objective. Its keys depend on the family."""

    def metadata(self) -> Mapping[str, object]:
        """The ``ss_`` fields of kohya for these keys, for the metadata of a LoRA file. None leaves a field out."""
        return {}


class DdpmSection(ObjectiveSection):
    """The training objective of discrete-time diffusion: predict the noise or the velocity."""

    min_snr_gamma: float = Field(
        0.0, ge=0, le=1000.0, description="Min-SNR loss weighting (arXiv 2303.09556); 0 off, 5 usual."
    )
    noise_offset: float = Field(
        0.0, ge=0, le=10.0, description="Per-channel offset added to the noise; 0 off, 0.05 usual."
    )
    zero_terminal_snr: bool = Field(
        False,
        description="Rescale the noise schedule to zero terminal SNR (arXiv 2305.08891). Min-SNR weights use the "
        "rescaled schedule, as in diffusers; kohya uses the original one, which changes gradients by 2 to 10 %.",
    )

    def metadata(self) -> Mapping[str, object]:
        return {
            "ss_min_snr_gamma": self.min_snr_gamma or None,
            "ss_noise_offset": self.noise_offset or None,
            "ss_zero_terminal_snr": self.zero_terminal_snr,
        }


class FlowSection(ObjectiveSection):
    """The training objective of flow matching: predict the velocity from the image to the noise.

    The noise level sigma is 0 for the image and 1 for noise.
    """

    timestep_sampling: Literal["logit-normal", "uniform"] = Field(
        "logit-normal",
        description="Distribution of the noise levels before the shift. logit-normal is the sigmoid of a normal number "
        "with logit_mean and logit_std.",
    )
    logit_mean: float = Field(
        0.0,
        ge=-10.0,
        le=10.0,
        description="Above 0: more noise; below 0: less. In the scripts of diffusers it is the other way round.",
    )
    logit_std: float = Field(
        1.0, gt=0, le=10.0, description="Spread of the logit-normal distribution (sigmoid_scale elsewhere)."
    )
    shift: Literal["auto", "resolution"] | Annotated[float, Field(gt=0, le=1000.0)] = Field(
        "auto",
        description="Above 1: more noise. A number, resolution (grows with the image's tokens), or auto, which takes "
        "what the base's scheduler config says. Previews always use that.",
    )

    def metadata(self) -> Mapping[str, object]:
        return {
            "ss_timestep_sampling": "uniform" if self.timestep_sampling == "uniform" else "sigmoid",
            "ss_discrete_flow_shift": self.shift if isinstance(self.shift, float) else None,
        }
