"""The recipe as frozen, typed sections: all keys with their defaults and descriptions.

The JSON Schema (``lora-rocm schema``), the reference page and ``check`` are generated from this file. Units are pixels,
steps (optimizer updates) and seconds unless a name says otherwise. Limits of numbers lie far beyond useful values, to
catch typing errors before they exhaust the machine's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from os.path import normpath
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from lora_rocm.recipe.adapter_sections import AdapterSection
from lora_rocm.recipe.optim_sections import OPTIMIZERS, OptimSection
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
    not_both,
    on_resume,
    one_of,
    refuse_unread,
)
from lora_rocm.recipe.source_sections import (
    OF_FOLDERS,
    OPTIONS_OF_CLASS_IMAGES,
    DataSource,
    NamedSource,
    SourceOptions,
)

if TYPE_CHECKING:
    from lora_rocm.families.spec import FamilySpec


class DataSection(SourceOptions):
    """Sources of images, captions and buckets."""

    path: InputFolder | None = Field(None, description="A folder of images (for several, use sources).")
    sources: tuple[DataSource, ...] = Field(
        (), max_length=MAX_ITEMS, description="Several sources, each with its own options."
    )
    prior_loss_weight: Weight = Field(1.0, description="Factor of the loss of regularisation images.")
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
        description="The most texts that shuffle_caption, caption_tag_dropout_rate and enable_wildcard make of each "
        "caption. All are cached.",
    )
    max_length: int = Field(
        2048, gt=0, le=MAX_TOKENS, description="Most tokens of a text that is trained on; the rest of it is cut off."
    )
    packing: bool = Field(
        False,
        description="Train on rows of several texts, none of which sees another: as many as fit into max_length. "
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
        "an entry of sources. Its loss is taken before training and with each held-out loss: it shows what is "
        "forgotten.",
    )

    @model_validator(mode="after")
    def _watched_alone(self) -> DataSection:
        if self.watched is not None and self.has_controls:
            what, fix = "cannot be watched beside control images", "Remove it."
            raise PydanticCustomError("rule", "{what}", {"what": what, "at": ("watched",), "fix": fix})
        trained = [_place(source) for source in self.sources] or [_place(self)]
        if self.watched is not None and _place(self.watched) in trained:
            what, fix = "is trained on, so its loss would not show what is forgotten", "Watch other samples."
            raise PydanticCustomError("rule", "{what}", {"what": what, "at": ("watched",), "fix": fix})
        return self

    @model_validator(mode="after")
    def _has_source(self) -> DataSection:
        if (self.path is None) == (not self.sources):
            raise one_of(self, "path", "sources")
        return self

    @model_validator(mode="after")
    def _folders_are_there(self) -> DataSection:
        if self.sources and all(source.path is None for source in self.sources):
            refuse_unread(self, OF_FOLDERS, "without a folder among the sources", "Remove it.")
        return self

    @model_validator(mode="after")
    def _files_can_be_paired(self) -> DataSection:
        for source in self.resolved_sources():
            name, keys = source.name, []
            if source.mask_path and (source.dataset or source.alpha_mask):
                keys = ["mask_path", "alpha_mask" if source.alpha_mask else "dataset"]
            elif source.control_path and source.dataset:
                keys = ["control_path", "dataset"]
            elif source.metadata_file and source.dataset:
                keys = ["metadata_file", "dataset"]
            if keys:
                what = f"{name} cannot have both {keys[0]} and {keys[1]}"
                fix = f"Remove one of them. {keys[0]} is for folders: rows of a dataset have no file names."
                raise PydanticCustomError("rule", "{what}", {"what": what, "keys": keys[:1], "fix": fix})
            if self.has_controls and not source.control_path:
                what = f"{name} has no control_path, and another source has one"
                fix = "Add its control_path, or train on it in a run of its own."
                raise PydanticCustomError("rule", "{what}", {"what": what, "keys": ["sources"], "fix": fix})
        return self

    @model_validator(mode="after")
    def _controls_show_the_same(self) -> DataSection:
        for source in self.resolved_sources():
            for key in ("random_crop", "color_aug", "crop_column") if source.control_path else ():
                if getattr(source, key):
                    what = f"{source.path} cannot have both {key} and control_path"
                    fix = f"Remove {key}: it would change the image, and not its control image with it."
                    raise PydanticCustomError("rule", "{what}", {"what": what, "keys": [key, "sources"], "fix": fix})
        return self

    @model_validator(mode="after")
    def _masks_are_there(self) -> DataSection:
        masked = {source.index: bool(source.mask_path or source.alpha_mask) for source in self.resolved_sources()}
        fix = "Remove it, or set mask_path or alpha_mask."
        for index, source in enumerate(self.sources):
            if source.unmasked_weight and not masked[index]:
                context = {
                    "what": "has no effect without masks",
                    "at": ("sources", index, "unmasked_weight"),
                    "fix": fix,
                }
                raise PydanticCustomError("rule", "{what}", context)
        if not any(masked.values()):
            refuse_unread(self, ("unmasked_weight", "normalize_masked_area_loss"), "without masks", fix)
        return self

    @model_validator(mode="after")
    def _some_are_to_be_learned(self) -> DataSection:
        are_reg = [source.is_reg for source in self.sources]
        if are_reg and all(are_reg):
            what = "all sources are regularisation images, so there is nothing to learn"
            fix = "Add the images that are to be learned as a source, or remove is_reg."
            raise PydanticCustomError("rule", "{what}", {"what": what, "at": ("sources", 0, "is_reg"), "fix": fix})
        if not any(are_reg):
            fix = "Remove it, or set is_reg: true in an entry of data.sources."
            refuse_unread(self, ("prior_loss_weight",), "without regularisation images", fix)
        return self

    @property
    def largest_resolution(self) -> int:
        """The largest resolution that ``data`` itself names, in pixels."""
        return max(sides_of(self.resolution))

    @property
    def has_controls(self) -> bool:
        """Whether the images have control images."""
        return any(source.control_path for source in self.resolved_sources())

    @property
    def watched_name(self) -> str:
        """The folder or dataset of ``watched``."""
        return "" if self.watched is None else self.watched.path or self.watched.dataset or ""

    def resolved_sources(self) -> tuple[ResolvedSource, ...]:
        """Every source at each of its resolutions, with the defaults of ``data`` filled in."""
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


def _place(source: NamedSource | DataSection) -> tuple[str, ...]:
    """Where the samples of a source are."""
    if isinstance(source, DataSection) or source.dataset is None:
        return (normpath(source.path),) if source.path else ()
    return normpath(source.dataset), source.split


def sides_of(resolution: int | tuple[int, ...]) -> tuple[int, ...]:
    """The resolutions that a key names, in pixels."""
    return resolution if isinstance(resolution, tuple) else (resolution,)


class ResolvedSource(SourceOptions):
    """A source at one of its resolutions, with the defaults of ``data`` filled in (not written by users).

    index: number of the source in the recipe. is_one_of: number of resolutions of this source. own: the options that
    its entry of ``data.sources`` gives.
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
        """What users know it by."""
        return self.path or self.dataset or f"class images of {self.class_prompt!r}, which the base draws"

    def key(self, option: str) -> str:
        """The key of the recipe that gives an option, in its entry or in ``data``."""
        return f"data.sources[{self.index}].{option}" if option in self.own else f"data.{option}"

    @property
    def weight(self) -> float:
        """The factor of the loss of its images."""
        return self.loss_weight * (self.prior_loss_weight if self.is_reg else 1.0)


class TrainSection(Section):
    """Length of training, batch size and precision."""

    max_train_steps: int | None = on_resume(None, "Optimizer updates. Give this or epochs.", gt=0, le=MAX_STEPS)
    epochs: int | None = on_resume(None, "Passes over the data. Give this or max_train_steps.", gt=0, le=MAX_EPOCHS)
    batch_size: Batch = Field(1, description="Samples in one forward pass.")
    gradient_accumulation_steps: Batch = Field(1, description="Micro-batches per update.")
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

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if (self.max_train_steps is None) == (self.epochs is None):
            raise one_of(self, "max_train_steps", "epochs")
        if self.validation_every_n_steps and self.validation_every_n_epochs:
            raise not_both("validation_every_n_steps", "validation_every_n_epochs")
        return self

    def num_steps(self, steps_per_epoch: int) -> int:
        """The number of updates of the whole run."""
        return self.max_train_steps or steps_per_epoch * (self.epochs or 1)

    def validation_steps(self, steps_per_epoch: int) -> int:
        """The number of updates between two held-out losses; 0: never."""
        return self.validation_every_n_steps or self.validation_every_n_epochs * steps_per_epoch


class Recipe(Section):
    """A whole recipe. Instances have a class made by ``recipe_class``, whose ``spec`` is that of the family."""

    spec: ClassVar[FamilySpec]

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

    @model_validator(mode="after")
    def _base_fits_adapter(self) -> Recipe:
        if self.model.quantization != "none" and (key := self.lora.needs_dense):
            what = f"{self.lora.title} needs dense weights, and model.quantization is {self.model.quantization}"
            fix = f"Train without lora.{key}, or set model.quantization: none."
            raise PydanticCustomError("rule", "{what}", {"what": what, "keys": ["lora"], "fix": fix})
        return self

    @model_validator(mode="after")
    def _activations_are_kept_or_recomputed(self) -> Recipe:
        if self.train.gradient_checkpointing and (memory := self.runtime.memory) in ("keep", "selective"):
            what = f"{memory} keeps activations, and train.gradient_checkpointing recomputes all of them"
            context = {"what": what, "at": ("runtime", "memory"), "fix": "Remove one of them."}
            raise PydanticCustomError("rule", "{what}", context)
        return self

    @model_validator(mode="after")
    def _compiled_code_draws_nothing(self) -> Recipe:
        # A layer makes the tensor for a new number of rows within a pass, which compiled code cannot do.
        drawn = [name for name in self.lora.drops if name != "dropout"]
        if drawn and self.runtime.compile in ("regional", "full"):
            what, fix = f"lora.{drawn[0]} does not go with compiled blocks", "Remove it, or runtime.compile."
            raise PydanticCustomError("rule", "{what}", {"what": what, "at": ("lora", drawn[0]), "fix": fix})
        return self

    @model_validator(mode="after")
    def _base_takes_control_images(self) -> Recipe:
        given = [number for number, source in enumerate(self.data.sources) if source.control_path]
        at: tuple[str | int, ...] = ("data", *(("sources", given[0]) if given else ()), "control_path")
        if not self.data.has_controls:
            shared = ("sample", "control_images") if self.sample.control_images else ()
            named = (
                self.sample.key_of("control_image", *each[:2])
                for each in self.sample.numbered()
                if each[2].control_image
            )
            at = () if self.model.may_inpaint else shared or next(named, ())
        if at and not self.model.takes_control:
            what = f"{self.spec.title} takes no control images"
            fix = f"Remove it, or set {self.model.for_control}." if self.model.for_control else "Remove it."
            raise PydanticCustomError("rule", "{what}", {"what": what, "at": at, "fix": fix})
        return self

    @model_validator(mode="after")
    def _masks_have_images(self) -> Recipe:
        model = self.model
        for key, number, preview in self.sample.numbered():
            what, name = "", "mask" if preview.mask else "control_image"
            if preview.mask and not model.may_inpaint:
                what, fix = f"{self.spec.title} takes no masks in previews", "Remove it."
            elif preview.mask and not preview.control_image:
                what, fix = "this mask has no image", "Name the image too: control_image, or sample.control_images."
            elif preview.control_image and not preview.mask and not model.takes_control:
                what = f"only inpainting bases of {self.spec.title} take an image in previews, and it needs a mask"
                fix = "Name its mask too (mask, or sample.masks), or remove it."
            if what:
                at = self.sample.key_of(name, key, number)
                raise PydanticCustomError("rule", "{what}", {"what": what, "at": at, "fix": fix})
        return self

    @model_validator(mode="after")
    def _no_source_has_larger_batches(self) -> Recipe:
        for index, source in enumerate(self.data.sources):
            if (source.max_batch_size or 0) > self.train.batch_size:
                what = (
                    f"this source has more samples in a batch than train.batch_size, which is {self.train.batch_size}"
                )
                at, fix = ("data", "sources", index, "max_batch_size"), "Raise train.batch_size, or lower this."
                raise PydanticCustomError("rule", "{what}", {"what": what, "at": at, "fix": fix})
        return self

    @model_validator(mode="after")
    def _pairs_are_not_packed(self) -> Recipe:
        if self.data.packing and self.objective.compares_pairs:
            what, fix = "pairs of answers are not put into rows with others", "Remove it."
            raise PydanticCustomError("rule", "{what}", {"what": what, "at": ("data", "packing"), "fix": fix})
        return self

    @model_validator(mode="after")
    def _optimizer_fits_weights(self) -> Recipe:
        name, dtypes = self.optim.optimizer, self.optim.weight_dtypes
        if self.optim.averages and self.train.ema_decay:
            what = f"{name} keeps an average of its own, which is the result"
            at, fix = ("train", "ema_decay"), "Remove train.ema_decay."
        elif self.optim.averages and self.lora.max_update_norm:
            what = f"{name} averages the weights, and the average would not be scaled down"
            at, fix = ("lora", "scale_weight_norms"), "Remove it, or take another optimizer."
        elif self.lora.sets_rates and not self.optim.reads_rates:
            what = f"{name} with relative_step reads no learning rates"
            at, fix = ("optim", "relative_step"), "Set it to false, or remove what sets learning rates from lora."
        elif self.lora.weight_dtype not in dtypes:
            what = f"{name} is not for lora.weight_dtype: {self.lora.weight_dtype}"
            others = [each for each, section in OPTIMIZERS.items() if self.lora.weight_dtype in section.weight_dtypes]
            fix = f"Set lora.weight_dtype: {dtypes[0]}, or take another optimizer: {', '.join(others)}."
            at = ("optim", "optimizer")
        else:
            return self
        raise PydanticCustomError("rule", "{what}", {"what": what, "at": at, "fix": fix})

    @model_validator(mode="after")
    def _new_tokens_are_there(self) -> Recipe:
        if (key := self.optim.embedding_until_key) and not self.lora.new_tokens:
            context = {"what": "has no effect without new tokens", "at": ("optim", key)}
            raise PydanticCustomError("rule", "{what}", {**context, "fix": "Remove it, or set lora.new_tokens."})
        return self

    @model_validator(mode="after")
    def _previews_suit_the_family(self) -> Recipe:
        step = self.spec.shapes.multiple_px
        for key, number, preview in self.sample.numbered():
            what, fix, side = "", "", ""
            if preview.sampler not in self.spec.samplers:
                what = f"{self.spec.title} is not drawn with the sampler {preview.sampler}"
                fix = f"Take {' or '.join(self.spec.samplers)}."
            elif preview.negative_prompt != self.sample.negative_prompt and not self.spec.reads(NEGATIVE_PROMPT):
                what, fix = f"{self.spec.title} reads no negative prompt", "Remove it."
            elif wrong := [name for name in ("width", "height") if (getattr(preview, name) or 0) % step]:
                side, px = wrong[0], getattr(preview, wrong[0])
                what = f"the sides of images of {self.spec.title} are multiples of {step} pixels, and one is {px}"
                fix = f"Take {px // step * step} or {px // step * step + step}."
            if what:
                at = ("sample", "sampler") if preview.sampler == self.sample.sampler and "sampler" in what else ()
                at = ("sample", side) if side and getattr(preview, side) == getattr(self.sample, side) else at
                raise PydanticCustomError(
                    "rule", "{what}", {"what": what, "at": at or ("sample", key, number), "fix": fix}
                )
        return self

    @property
    def formats(self) -> tuple[str, ...]:
        """The forms in which the result is written: as given, else the family's usual one."""
        return self.output.formats or self.spec.formats[:1]

    @property
    def exportable(self) -> tuple[str, ...]:
        """The forms in which ``lora-rocm export`` writes the result."""
        spec = self.spec
        return tuple(form for form in (*spec.formats, *spec.conversions) if form in self.lora.forms)

    def unwritten(self, form: str, forms: Sequence[str]) -> tuple[str, str]:
        """(problem, remedy) for a form in which the adapter is not written. ``forms``: those in which it is."""
        lora = self.lora
        title = f"{lora.title} of {self.spec.title}{' with trained norms' if lora.train_norms else ''}"
        title = f"{'an' if title[0] in 'AEIO' else 'a'} {title}"
        why, take = "nothing would read it", ""
        if form in lora.formats and form not in lora.forms and lora.train_norms:
            why = "trained norms have no place in it"
        elif form in ("merged", "gguf") and form not in self.spec.conversions:
            why = "it is a form of language models"
        elif form == "comfyui" and "kohya" in forms:
            why, take = "it differs from the form kohya only in the magnitudes of a DoRA", "Take kohya. "
        return f"{title} is not written in the form {form}: {why}", f"{take}Forms of {title}: {', '.join(forms)}."

    @property
    def watching(self) -> Recipe | None:
        """The recipe whose samples are those of ``data.watched``, all held out; None: none is watched."""
        train, watched = self.train, self.data.watched
        if watched is None or not (train.validation_every_n_steps or train.validation_every_n_epochs):
            return None
        source = DataSource.model_validate(watched.model_dump())
        alone = {"path": None, "sources": (source,), "watched": None, "validation_split": 1.0}
        alone |= {"color_aug": 0, "random_crop": bool(self.data.random_crop)}  # only the first version is seen
        data = self.data.model_copy(update={**alone, "mask_path": None, "alpha_mask": False})
        return self.model_copy(update={"data": data, "objective": self.objective.watching, "sample": SampleSection()})

    def trains(self, component: str) -> bool:
        """Whether a component of an adapter's runs in a step: text encoders do if they, or new tokens, are trained."""
        return component not in self.spec.text_components or self.lora.tokenises

    @property
    def preview_size(self) -> tuple[int, int]:
        """(width, height) of previews in pixels: as given, else the resolution rounded down to fit the family."""
        step = self.spec.shapes.multiple_px
        side = max(self.data.largest_resolution // step, 1) * step
        return self.sample.width or side, self.sample.height or side


NEGATIVE_PROMPT = "sample.negative_prompt"
TEXT_KEY, TOKENS_KEY = "train_text_encoder", "new_tokens"
"""The keys of ``lora`` that a family without text encoders, or without embedding files, refuses."""
MOVED = {("train", name): ("objective", name) for name in ("min_snr_gamma", "noise_offset", "zero_terminal_snr")}
"""Old place -> new place of keys that have moved; the old places are still read."""


@cache
def recipe_class(family: FamilySpec, adapter: type[AdapterSection], optimizer: type[OptimSection]) -> type[Recipe]:
    """The recipe class of these kinds: ``Recipe`` with their sections. The same kinds give the same class."""
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
    made.spec = family
    return made
