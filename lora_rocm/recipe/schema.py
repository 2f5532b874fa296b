"""The recipe as frozen, typed sections: all keys with their defaults and descriptions.

The JSON Schema (``lora-rocm schema``), the reference page and ``check`` are generated from this file. Units are pixels,
steps (optimizer updates) and seconds unless a name says otherwise. Limits of numbers lie far beyond useful values, to
catch typing errors before they exhaust the machine's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, create_model, model_validator

from lora_rocm.recipe.sections import (
    MAX_BUCKET_STEP,
    MAX_EPOCHS,
    MAX_GUIDANCE,
    MAX_ITEMS,
    MAX_RANK,
    MAX_SAMPLE_STEPS,
    MAX_SIDE_PX,
    MAX_STEPS,
    MAX_TIMEOUT_S,
    MAX_WORKERS,
    Batch,
    Decay,
    Fraction,
    InputFile,
    InputFolder,
    ModelSection,
    ObjectiveSection,
    OutputFolder,
    PathOrHubId,
    PathText,
    Repeats,
    Resolution,
    Section,
    Tags,
    on_resume,
    one_of,
)

if TYPE_CHECKING:
    from lora_rocm.families.spec import FamilySpec


class SourceOptions(Section):
    """Options of a source of images. Under ``data`` they are the defaults of all sources."""

    resolution: Resolution = Field(1024, description="Side in pixels of the square whose area the buckets keep to.")
    repeats: Repeats = Field(1, description="How often each image is seen in an epoch.")
    caption_extension: str = Field(".txt", description="Extension of the caption files beside the images.")
    caption_fallback: Literal["filename", "trigger", "empty", "error"] = Field(
        "filename",
        description="Caption of an image without a caption file: its file name, the trigger word, or nothing.",
    )
    trigger_word: str | None = Field(None, description="Put in front of every caption that does not contain it.")
    shuffle_caption: bool = Field(False, description="Shuffle the comma-separated tags of a caption.")
    keep_tokens: Tags = Field(0, description="How many tags at the front are never shuffled or moved.")
    caption_dropout_rate: Fraction = Field(0.0, description="Share of steps that see the empty caption instead.")
    flip_aug: bool = Field(False, description="Also train on mirrored images (cached; half of the draws).")
    recursive: bool = Field(True, description="Read the sub-folders of a folder too.")
    exclude: Annotated[tuple[PathText, ...], Field(max_length=MAX_ITEMS)] = Field(
        (),
        description="Files and sub-folders of a folder to leave out: names, or paths below it with slashes. * stands "
        "for anything, also slashes; case does not count.",
    )


class DataSource(Section):
    """One source: a folder of images, or a ``datasets`` source. Options that are not set come from ``data``."""

    path: InputFolder | None = Field(None, description="A folder of images, with its sub-folders.")
    dataset: PathOrHubId | None = Field(
        None,
        description="A datasets source: hub id, Parquet file or folder, folder of images with a metadata file "
        "(imagefolder), or a folder written by save_to_disk.",
    )
    split: str = Field("train", description="Split of the dataset.")
    image_column: str = Field("image", description="Column with the image.")
    caption_column: str | None = Field(
        "text", description="Column with the caption; with path, of metadata.jsonl or metadata.csv beside the images."
    )
    resolution: Resolution | None = None
    repeats: Repeats | None = None
    caption_extension: str | None = None
    caption_fallback: Literal["filename", "trigger", "empty", "error"] | None = None
    trigger_word: str | None = None
    shuffle_caption: bool | None = None
    keep_tokens: Tags | None = None
    caption_dropout_rate: Fraction | None = None
    flip_aug: bool | None = None
    recursive: bool | None = None
    exclude: Annotated[tuple[PathText, ...], Field(max_length=MAX_ITEMS)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> DataSource:
        if (self.path is None) == (self.dataset is None):
            raise one_of(self, "path", "dataset")
        return self


class DataSection(SourceOptions):
    """Sources of images, captions and buckets."""

    path: InputFolder | None = Field(None, description="A folder of images (for several, use sources).")
    sources: tuple[DataSource, ...] = Field(
        (), max_length=MAX_ITEMS, description="Several sources, each with its own options."
    )
    bucket_step: int = Field(
        64, gt=0, le=MAX_BUCKET_STEP, description="Bucket sides are multiples of this many pixels."
    )
    bucket_max_aspect: float = Field(2.5, ge=1.0, le=100.0, description="Longest side over shortest side of a bucket.")
    enable_bucket: bool = Field(True, description="Aspect-ratio buckets; false crops everything to a square.")
    upscale: bool = Field(False, description="Enlarge images that are smaller than their bucket.")
    caption_variants: int = Field(4, gt=0, le=1000, description="How many shuffles of each caption are cached.")
    validation_split: Annotated[float, Field(ge=0.0, le=0.5)] = Field(
        0.0, description="Share of the images held out for the validation loss."
    )

    @model_validator(mode="after")
    def _has_source(self) -> DataSection:
        if (self.path is None) == (not self.sources):
            raise one_of(self, "path", "sources")
        return self

    def resolved_sources(self) -> tuple[ResolvedSource, ...]:
        """Every source with the defaults of ``data`` filled in."""
        sources = self.sources or (DataSource(path=self.path),)
        names = SourceOptions.model_fields
        resolved = []
        for source in sources:
            own = {name: getattr(source, name) for name in names if getattr(source, name) is not None}
            defaults = {name: getattr(self, name) for name in names}
            rest = {name: getattr(source, name) for name in DataSource.model_fields if name not in names}
            resolved.append(ResolvedSource(**{**defaults, **own, **rest}))
        return tuple(resolved)


class ResolvedSource(SourceOptions):
    """A source with the defaults of ``data`` filled in (not written by users)."""

    path: str | None
    dataset: str | None
    split: str
    image_column: str
    caption_column: str | None


class AdapterSection(Section):
    """The adapter: the keys that every kind of adapter reads.

    formats: the values of ``output.formats`` in which the adapter can be written.
    """

    formats: ClassVar[tuple[str, ...]] = ("kohya", "diffusers", "peft")

    type: str = Field(description="Kind of adapter.")
    rank: int = Field(16, gt=0, le=MAX_RANK, description="Rank of the update.")
    alpha: float | None = Field(
        None, gt=0, le=100_000.0, description="Scale is alpha / rank; unset means alpha = rank."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Dropout on the adapter's input.")
    targets: str | Annotated[tuple[str, ...], Field(max_length=MAX_ITEMS)] = Field(
        "attention-mlp",
        description="A preset (attention, attention-mlp, attention-mlp-conv) or regular expressions of module names.",
    )
    train_text_encoder: bool = Field(False, description="Also adapt the text encoders.")
    weight_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Of the trained weights and their moments. bf16 takes less memory, and loses small updates."
    )
    init_from: InputFile | None = Field(
        None,
        description="Start from this file (kohya, diffusers or PEFT), of the same type. Modules of a lower rank are "
        "filled up to rank; the effect is the file's.",
    )

    @property
    def title(self) -> str:
        """The usual name of the adapter."""
        return self.type

    @property
    def effective_alpha(self) -> float:
        return float(self.rank if self.alpha is None else self.alpha)


class LoraSection(AdapterSection):
    """The adapter."""

    type: Literal["lora"] = Field("lora", description="Kind of adapter.")
    use_rslora: bool = Field(False, description="Rank-stabilised scale: alpha / sqrt(rank).")
    use_dora: bool = Field(False, description="Weight-decomposed LoRA (magnitude trained too).")

    @property
    def title(self) -> str:
        return "DoRA" if self.use_dora else "LoRA"


class LokrSection(AdapterSection):
    """The adapter: LyCORIS' LoKr, a Kronecker product of two small matrices."""

    formats = ("kohya", "peft")

    type: Literal["lokr"] = Field("lokr", description="Kind of adapter.")
    factor: int = Field(
        -1,
        ge=-1,
        le=MAX_RANK,
        description="Size of the first matrix; a side that it does not divide is cut by the next smaller number that "
        "does. -1: near the square root of each side.",
    )
    decompose_both: bool = Field(
        False, description="The first matrix, too, is a product of rank rank where that is smaller."
    )

    @property
    def title(self) -> str:
        return "LoKr"


class OptimSection(Section):
    """Optimizer and schedule: the keys that every optimizer reads. Steps are optimizer updates.

    Attributes:
        usual_rates: (lowest, highest) learning rate without a notice.
        rate_advice: half a sentence about its usual learning rate.
    """

    usual_rates: ClassVar[tuple[float, float]] = (0.0, math.inf)
    rate_advice: ClassVar[str] = ""

    optimizer: str = Field(description="Optimizer.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    text_encoder_learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate of the text encoders; unset means learning_rate."
    )
    weight_decay: float = Field(0.01, ge=0, le=100.0, description="Decoupled weight decay.")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    lr_warmup_steps: int = Field(
        0, ge=0, le=MAX_STEPS, description="Linear warm-up: update i of w is made with i / (w + 1) of the rate."
    )
    max_grad_norm: float = Field(1.0, ge=0, le=1e9, description="Clip the total gradient norm; 0 switches it off.")


class AdamwSection(OptimSection):
    """Optimizer and schedule. Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-2)
    rate_advice: ClassVar[str] = (
        "which usually takes 1.0e-4. Rates near 1 are meant for Prodigy: for that set optim.optimizer: prodigy."
    )

    optimizer: Literal["adamw"] = Field("adamw", description="Optimizer.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of the two moments.")
    epsilon: float = Field(1e-8, gt=0, le=1.0, description="Added to the denominator.")


class ProdigySection(OptimSection):
    """Prodigy estimates the learning rate itself (arXiv 2306.06101). Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (1e-2, 10.0)
    rate_advice: ClassVar[str] = (
        "which estimates the learning rate itself and takes 1.0 as its factor; optim.d_coef is the way to tune it."
    )

    optimizer: Literal["prodigy"] = Field("prodigy", description="Optimizer.")
    learning_rate: float = Field(1.0, gt=0, description="Factor of the estimated learning rate.")
    text_encoder_learning_rate: float | None = Field(
        None, gt=0, description="Factor for the text encoders; unset means learning_rate."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of the two moments.")
    beta3: Decay | None = Field(
        None, description="Decay of the sums that the estimate is made of; unset means the root of the second beta."
    )
    epsilon: float = Field(1e-8, gt=0, le=1.0, description="Added to the denominator, times the estimate.")
    d0: float = Field(1e-6, gt=0, le=1.0, description="The estimate at the start.")
    d_coef: float = Field(1.0, gt=0, le=1000.0, description="Factor of the estimate; 0.5 and 2 are usual too.")
    use_bias_correction: bool = Field(False, description="Adam's correction of the moments, which are zero at first.")
    safeguard_warmup: bool = Field(
        False,
        description="Keep a warm-up of the learning rate from raising the estimate; for lr_warmup_steps.",
    )


class TrainSection(Section):
    """Length of training, batch size and precision."""

    max_train_steps: int | None = on_resume(None, "Optimizer updates. Give this or epochs.", gt=0, le=MAX_STEPS)
    epochs: int | None = on_resume(None, "Passes over the data. Give this or max_train_steps.", gt=0, le=MAX_EPOCHS)
    batch_size: Batch = Field(1, description="Samples in one forward pass.")
    gradient_accumulation_steps: Batch = Field(1, description="Forward passes for one update.")
    seed: int = Field(0, ge=0, lt=2**31, description="Everything random follows from this.")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        "auto", description="auto is bf16 on a GPU that computes it, fp16 on other GPUs, no (float32) on the CPU."
    )
    gradient_checkpointing: bool = on_resume(
        False, "Recompute activations: less memory, slower. false leaves it to runtime.memory."
    )
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Keep an average of the adapter and export that; 0 switches it off, 0.999 is usual."
    )
    validation_every_n_steps: int = on_resume(
        0, "Compute the held-out loss this often; 0 means never.", ge=0, le=MAX_STEPS
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if (self.max_train_steps is None) == (self.epochs is None):
            raise one_of(self, "max_train_steps", "epochs")
        return self


class SampleSection(Section):
    """Preview images. All keys may change on resume."""

    every_n_steps: int = on_resume(0, "Draw previews this often; 0 means only before and after.", ge=0, le=MAX_STEPS)
    prompts: tuple[str, ...] = on_resume((), "What to draw; empty means no previews.", max_length=MAX_ITEMS)
    control_prompts: tuple[str, ...] = on_resume(
        (), "Prompts without the concept, which the LoRA should leave alone.", max_length=MAX_ITEMS
    )
    negative_prompt: str = on_resume("", "What to stay away from.")
    seed: int = on_resume(1234, "Seed of the first image; the next ones count up.", ge=0, lt=2**31)
    guidance_scale: float = on_resume(6.0, "Classifier-free guidance.", ge=1.0, le=MAX_GUIDANCE)
    steps: int = on_resume(25, "Denoising steps.", gt=0, le=MAX_SAMPLE_STEPS)
    width: int | None = on_resume(None, "Width in pixels; unset means data.resolution.", gt=0, le=MAX_SIDE_PX)
    height: int | None = on_resume(None, "Height in pixels; unset means data.resolution.", gt=0, le=MAX_SIDE_PX)


class RuntimeSection(Section):
    """Use of the machine. All keys may change on resume, but a bit-exact resume needs an unchanged thread count."""

    device: Literal["auto", "cpu", "gpu"] = on_resume("auto", "Where to train.")
    workers: int = on_resume(
        0, "DataLoader workers (spawned, CPU tensors only). 0 is right on AMD.", ge=0, le=MAX_WORKERS
    )
    worker_timeout_s: float = on_resume(
        300.0,
        "Loader workers silent for this long are given up; half as many go on, in the end none.",
        gt=0,
        le=MAX_TIMEOUT_S,
    )
    persistent_workers: bool = on_resume(
        False, "Keep the workers when reading begins anew (validation, a repaired cache entry) instead of new ones."
    )
    workers_on_windows: bool = on_resume(False, "On Windows runtime.workers counts as 0 unless this is true.")
    pin_memory: Literal["auto", "yes", "no"] = on_resume("auto", "Page-locked batches; auto means on a GPU.")
    deterministic: bool = on_resume(False, "Only deterministic GPU kernels: slower, and a resume is exact to the byte.")
    graphs: Literal["auto", "off"] = on_resume(
        "auto",
        "auto: on a GPU each step is captured and replayed as one graph, once that has given the same gradients; not "
        "with lora.dropout.",
    )
    compile: Literal["auto", "off", "regional", "full"] = on_resume(
        "auto",
        "torch.compile on a GPU: regional: the repeated blocks; full: whole components; each size of images is "
        "compiled before the first step, which takes minutes. auto is off: this program's own kernels are faster.",
    )
    memory: Literal["auto", "keep", "selective", "recompute", "offload"] = on_resume(
        "auto",
        "What of a step stays in the GPU's memory. keep: everything; selective: the activations of as many blocks as "
        "must be are computed again; recompute: those of all; offload: the frozen weights of blocks wait in main "
        "memory besides. auto: the fastest that fits, also cutting micro-batches into parts (lora-rocm plan shows it).",
    )
    canary_every_n_steps: int = on_resume(
        250,
        "Kernels with known answers, and the frozen base, are checked again this often; always at the start and before "
        "anything is written. 0: only then.",
        ge=0,
        le=MAX_STEPS,
    )
    profile: Literal["safe", "fast"] = on_resume(
        "safe", "fast: also the faster GPU libraries, where the self-test has cleared them on this very software."
    )
    self_test: Literal["auto", "no"] = on_resume(
        "auto", "auto: an AMD GPU is tested once before its first run (minutes); no: never."
    )
    max_restarts: int = on_resume(
        10,
        "How often a worker that failed is started again; a start that came no further than the one before counts "
        "two, and each checkpoint gives one back. 0: never.",
        ge=0,
        le=10_000,
    )
    threads: int | None = on_resume(None, "CPU threads of torch; unset keeps torch's choice.", gt=0, le=1024)

    def workers_on(self, system: str) -> int:
        """The effective number of workers on a system (named as in ``sys.platform``): 0 on Windows unless confirmed."""
        return self.workers if system != "win32" or self.workers_on_windows else 0


class TimeoutsSection(Section):
    """Seconds of silence per phase before the worker is killed and restarted.

    Unset: a generous first limit, then a multiple of the usual time measured in the run.
    """

    start: float | None = on_resume(
        None, "From the start of the process to its first phase, and between two phases.", gt=0, le=MAX_TIMEOUT_S
    )
    load: float | None = on_resume(None, "Loading the base model.", gt=0, le=MAX_TIMEOUT_S)
    cache: float | None = on_resume(None, "One image or caption while caching.", gt=0, le=MAX_TIMEOUT_S)
    compile: float | None = on_resume(None, "With runtime.compile: each part that is compiled.", gt=0, le=MAX_TIMEOUT_S)
    first_step: float | None = on_resume(
        None, "The first step of a start: kernels are compiled.", gt=0, le=MAX_TIMEOUT_S
    )
    step: float | None = on_resume(
        None, "Every further step, and each batch of a held-out pass.", gt=0, le=MAX_TIMEOUT_S
    )
    checkpoint: float | None = on_resume(None, "Checking the state and writing a checkpoint.", gt=0, le=MAX_TIMEOUT_S)
    preview: float | None = on_resume(None, "One round of previews.", gt=0, le=MAX_TIMEOUT_S)
    export: float | None = on_resume(None, "Writing and checking the LoRA.", gt=0, le=MAX_TIMEOUT_S)


class CacheSection(Section):
    """The cache of encoded images and captions, kept between runs."""

    dir: OutputFolder = on_resume("cache", "Cache folder, relative to where the command runs.")


class OutputSection(Section):
    """Output files and folders."""

    name: str = on_resume("lora", "Title in the file's metadata.")
    dir: OutputFolder = on_resume("runs", "Run directories are made in here, relative to where the command runs.")
    save_every_n_steps: int = on_resume(500, "Checkpoint (and a usable LoRA file) this often.", gt=0, le=MAX_STEPS)
    keep_last: int = on_resume(
        2, "How many checkpoints are kept for resuming; LoRA files are all kept.", gt=0, le=10_000
    )
    formats: tuple[Literal["kohya", "diffusers", "peft"], ...] = on_resume(
        ("kohya",), "What to write at the end.", max_length=MAX_ITEMS
    )
    dtype: Literal["fp16", "bf16", "fp32"] = on_resume("fp16", "Number format of the exported weights.")
    author: str | None = on_resume(None, "Metadata.")
    description: str | None = on_resume(None, "Metadata.")
    license: str | None = on_resume(None, "Metadata.")


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

    @property
    def preview_size(self) -> tuple[int, int]:
        """(width, height) of previews in pixels: as given, else the resolution rounded down to fit the family."""
        step = self.spec.shapes.multiple_px
        side = max(self.data.resolution // step, 1) * step
        return self.sample.width or side, self.sample.height or side


ADAPTERS: Mapping[str, type[AdapterSection]] = {"lora": LoraSection, "lokr": LokrSection}
"""The section of each ``lora.type``; the first is the default."""
OPTIMIZERS: Mapping[str, type[OptimSection]] = {"adamw": AdamwSection, "prodigy": ProdigySection}
"""The section of each ``optim.optimizer``; the first is the default."""
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
