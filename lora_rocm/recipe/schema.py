"""The recipe as frozen, typed sections: all keys with their defaults and descriptions.

The JSON Schema (``lora-rocm schema``), the reference page and ``check`` are generated from this file. Units are pixels,
steps (optimizer updates) and seconds, unless a name contains another unit. Numeric limits are far above useful values:
they catch typing errors before these exhaust the machine's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, ValidationInfo, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lora_rocm.recipe.adapter_sections import AdapterSection
from lora_rocm.recipe.family_rules import unwritten
from lora_rocm.recipe.judge import Broken, broken_rules, values_of
from lora_rocm.recipe.key_rules.table import rules_for
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.output_section import OutputSection
from lora_rocm.recipe.process_sections import CacheSection, RuntimeSection, TimeoutsSection
from lora_rocm.recipe.sample_section import SampleSection
from lora_rocm.recipe.sections import (
    MAX_BUCKET_STEP,
    MAX_EPOCHS,
    MAX_ITEMS,
    MAX_STEPS,
    MAX_TOKENS,
    Batch,
    InputFolder,
    ModelSection,
    ObjectiveSection,
    Resolution,
    Section,
    Weight,
    on_resume,
)
from lora_rocm.recipe.source_sections import OPTIONS_OF_CLASS_IMAGES, DataSource, NamedSource, SourceOptions

if TYPE_CHECKING:
    from lora_rocm.families.registry import FamilyRegistry
    from lora_rocm.families.spec import FamilySpec


class DataSection(SourceOptions):
    """The sources of images, their captions, and the buckets."""

    path: InputFolder | None = Field(None, description="A folder of images (for several, use sources).")
    sources: tuple[DataSource, ...] = Field(
        (), max_length=MAX_ITEMS, description="Several sources, each with its own options."
    )
    prior_loss_weight: Weight = Field(
        1.0, description="Factor by which the loss of regularisation images is multiplied."
    )
    bucket_step: int = Field(
        64, gt=0, le=MAX_BUCKET_STEP, description="Bucket sides are multiples of this many pixels."
    )
    bucket_max_aspect: float = Field(2.5, ge=1.0, le=100.0, description="Longest side over shortest side of a bucket.")
    enable_bucket: bool = Field(True, description="Aspect-ratio buckets; false crops everything to a square.")
    upscale: bool = Field(False, description="Enlarge images that are smaller than their bucket.")
    caption_variants: int = Field(
        4,
        gt=0,
        le=1000,
        description="Maximum number of variants of each caption by shuffle_caption, caption_tag_dropout_rate and "
        "enable_wildcard. All are cached.",
    )
    max_length: int = Field(
        2048, gt=0, le=MAX_TOKENS, description="Maximum number of tokens of a text in training; the rest is cut off."
    )
    packing: bool = Field(
        False,
        description="Train on rows of several texts, as many as fit into max_length. No text attends to another. "
        "batch_size then counts rows.",
    )
    normalize_masked_area_loss: bool = Field(
        True,
        description="Divide the loss of an image by the area of its mask, so that small masks count as much as large "
        "ones. kohya does not; OneTrainer and ai-toolkit have a switch for it.",
    )
    validation_split: Annotated[float, Field(ge=0.0, le=0.5)] = Field(
        0.0, description="Share of the images held out for the validation loss."
    )
    watched: NamedSource | None = on_resume(
        None,
        "A source that is never trained on: path or dataset, with the keys split, image_column and caption_column of "
        "an entry of sources. Its loss is measured before training and with each held-out loss: it shows what the "
        "model forgets.",
    )

    @property
    def largest_resolution(self) -> int:
        """Largest resolution set directly in ``data``, in pixels."""
        return max(sides_of(self.resolution))

    @property
    def most_frames(self) -> int:
        """Largest number of frames of a clip, or 1 if there are no clips."""
        return max(max(source.lengths) for source in self.resolved_sources())

    @property
    def num_controls(self) -> int:
        """Number of control images per image."""
        return max(len(source.control_places) for source in self.resolved_sources())

    @property
    def has_controls(self) -> bool:
        """Whether the images have control images."""
        return self.num_controls > 0

    @property
    def watched_name(self) -> str:
        """Folder or dataset of ``data.watched``."""
        return "" if self.watched is None else self.watched.path or self.watched.dataset or ""

    def resolved_sources(self) -> tuple[ResolvedSource, ...]:
        """Every source once per resolution, with the options that it inherits from ``data``."""
        sources = self.sources or (DataSource(path=self.path),)
        names = SourceOptions.model_fields
        resolved = []
        for index, source in enumerate(sources):
            own = {name: getattr(source, name) for name in names if getattr(source, name) is not None}
            known = names if source.class_prompt is None else OPTIONS_OF_CLASS_IMAGES
            values = {name: getattr(self, name) for name in known} | own
            values |= {name: getattr(source, name) for name in DataSource.model_fields if name not in names}
            sides = sides_of(values.pop("resolution"))
            values |= {
                "own": frozenset(own),
                "index": index,
                "prior_loss_weight": self.prior_loss_weight,
                "is_one_of": len(sides),
            }
            resolved += [ResolvedSource(**values, resolution=side) for side in sides]
        return tuple(resolved)


def sides_of(resolution: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the resolutions that a key lists, in pixels."""
    return resolution if isinstance(resolution, tuple) else (resolution,)


class ResolvedSource(SourceOptions):
    """A source at one of its resolutions, with the options that it inherits from ``data``. Users do not write it.

    index: the source's number in the recipe. is_one_of: number of resolutions that this source has. own: the
    options set in
    the source's own entry of ``data.sources``.
    """

    own: frozenset[str]
    resolution: Resolution
    index: int
    is_one_of: int
    path: str | None
    dataset: str | None
    split: str
    image_column: str
    caption_column: str | None
    loss_weight_column: str | None
    crop_column: str | None
    is_reg: bool
    class_prompt: str | None
    num_class_images: int
    max_batch_size: int | None
    prior_loss_weight: float

    @property
    def name(self) -> str:
        """The source's name, shown to users."""
        return self.path or self.dataset or f"class images of {self.class_prompt!r}, which the base draws"

    def key(self, option: str) -> str:
        """Return the recipe key that sets an option: in the source's own entry, or in ``data``."""
        return f"data.sources[{self.index}].{option}" if option in self.own else f"data.{option}"

    @property
    def weight(self) -> float:
        """Factor by which the loss of the source's images is multiplied."""
        return self.loss_weight * (self.prior_loss_weight if self.is_reg else 1.0)


class TrainSection(Section):
    """Length of training, batch size and precision."""

    max_train_steps: int | None = on_resume(None, "Optimizer updates. Give this or epochs.", gt=0, le=MAX_STEPS)
    epochs: int | None = on_resume(None, "Passes over the data. Give this or max_train_steps.", gt=0, le=MAX_EPOCHS)
    batch_size: Batch = Field(1, description="Samples in one forward pass.")
    gradient_accumulation_steps: Batch = Field(
        1, description="Micro-batches per update. More of them act like a larger batch."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of all random numbers.")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        "auto",
        description="auto is bf16 on a GPU that computes it, fp16 on other GPUs (bf16 if the family's products do not "
        "fit fp16), no (float32) on the CPU.",
    )
    gradient_checkpointing: bool = on_resume(
        False, "Recompute activations: less memory, slower. false leaves the choice to runtime.memory."
    )
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Keep a moving average (EMA) of the adapter and export it; 0 disables it, 0.999 is usual."
    )
    validation_every_n_steps: int = on_resume(
        0, "Updates between two held-out losses; 0 means never.", ge=0, le=MAX_STEPS
    )
    validation_every_n_epochs: int = on_resume(
        0, "Epochs between two held-out losses, in place of validation_every_n_steps.", ge=0, le=MAX_EPOCHS
    )

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates of the whole run."""
        return self.max_train_steps or steps_per_epoch * (self.epochs or 1)

    def validation_steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates between two measurements of the held-out loss; 0 if it is never measured."""
        return self.validation_every_n_steps or self.validation_every_n_epochs * steps_per_epoch


RULES_ARE_JUDGED_APART: Mapping[str, object] = {"rules": "judged apart"}
"""Pydantic context for validating without the rules over several keys.

The caller checks them even if values are wrong.
"""


def _error(broken: Broken) -> InitErrorDetails:
    context = {"what": broken.what, "fix": broken.fix, "place": broken.key}
    return InitErrorDetails(type=PydanticCustomError("rule", "{what}", context), loc=broken.key, input=None)


class Recipe(Section):
    """A whole recipe.

    ``recipe_class`` creates the subclass for each combination of kinds. spec: the family from ``registry``.
    """

    spec: ClassVar[FamilySpec]
    registry: ClassVar[FamilyRegistry]

    model: ModelSection
    data: DataSection
    lora: AdapterSection
    optim: OptimSection
    objective: ObjectiveSection
    train: TrainSection
    sample: SampleSection = SampleSection()
    runtime: RuntimeSection = RuntimeSection()
    timeouts: TimeoutsSection = TimeoutsSection()
    cache: CacheSection = CacheSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="wrap")
    @classmethod
    def _rules_hold(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        recipe = handler(data)
        if info.context is not RULES_ARE_JUDGED_APART:
            values = values_of(recipe, cls.spec, data if isinstance(data, Mapping) else recipe.model_dump())
            broken = broken_rules(rules_for(cls.spec), values)
            if broken:
                raise ValidationError.from_exception_data(cls.__name__, [_error(each) for each in broken])
        return recipe

    @property
    def formats(self) -> tuple[str, ...]:
        """File formats in which the result is written: ``output.formats``, or else the family's usual format."""
        return self.output.formats or self.spec.formats[:1]

    @property
    def exportable(self) -> tuple[str, ...]:
        """File formats in which ``lora-rocm export`` can write the result."""
        spec = self.spec
        return tuple(form for form in (*spec.formats, *spec.conversions) if form in self.lora.writable_formats)

    def unwritten(self, file_format: str, file_formats: Sequence[str]) -> tuple[str, str]:
        """Return (problem, fix) for a file format in which the adapter cannot be written.

        ``file_formats``: the formats in which it can be written.
        """
        return unwritten(self.spec, self.lora, file_format, file_formats)

    @property
    def watching(self) -> Recipe | None:
        """The recipe with only the samples of ``data.watched``, all held out.

        None if there are none, or no held-out loss is measured.
        """
        train, watched = self.train, self.data.watched
        if watched is None or not (train.validation_every_n_steps or train.validation_every_n_epochs):
            return None
        source = DataSource.model_validate(watched.model_dump())
        alone = {"path": None, "sources": (source,), "watched": None, "validation_split": 1.0}
        alone |= {"color_aug": 0, "random_crop": bool(self.data.random_crop)}  # only the first version is seen
        data = self.data.model_copy(update={**alone, "mask_path": None, "alpha_mask": False})
        return self.model_copy(update={"data": data, "objective": self.objective.watching, "sample": SampleSection()})

    def trains(self, component: str) -> bool:
        """Return whether training runs a component of the adapter.

        A text encoder runs only if it or new tokens are trained.
        """
        return component not in self.spec.text_components or self.lora.tokenises

    @property
    def preview_size(self) -> tuple[int, int]:
        """(width, height) of previews in pixels: as given, or else the resolution rounded down to a valid size."""
        step = self.spec.axes.multiple_px
        side = max(self.data.largest_resolution // step, 1) * step
        return self.sample.width or side, self.sample.height or side


MOVED = {("train", name): ("objective", name) for name in ("min_snr_gamma", "noise_offset", "zero_terminal_snr")}
"""New place of each key that has moved, keyed by its old place. The old places are still read."""


@cache
def recipe_class(
    registry: FamilyRegistry, family: FamilySpec, adapter: type[AdapterSection], optimizer: type[OptimSection]
) -> type[Recipe]:
    """Return the subclass of ``Recipe`` with the sections of these kinds. Equal kinds return the same class."""
    made = create_model(
        "Recipe",
        __base__=Recipe,
        __doc__="A whole recipe.",
        __module__=__name__,
        model=(family.model_section, ...),
        lora=(adapter, adapter.model_validate({})),
        optim=(optimizer, optimizer.model_validate({})),
        objective=(family.objective_section, family.objective_section()),
    )
    made.spec, made.registry = family, registry
    return made
