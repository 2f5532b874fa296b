"""The ``lora`` section of a recipe: the shared keys of all adapters, and the keys of each kind."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lora_rocm.recipe.sections import MAX_ITEMS, MAX_RANK, InputFile, Section

MAX_OVERRIDES = 64
Pattern = Annotated[str, Field(min_length=1)]  # an empty expression matches no module
Rank = Annotated[int, Field(gt=0, le=MAX_RANK)]
Alpha = Annotated[float, Field(gt=0, le=100_000.0)]
MERGED, GGUF = "merged", "gguf"
"""Formats that only ``lora-rocm export`` writes, not a run."""
FORMS_WITH_NORMS = ("kohya", "comfyui")
"""The formats that can store trained norm layers."""
FROM_BASE = ("pissa", "olora")
"""The values of ``lora.init`` that derive the initial A and B from the base's weight."""
DROPOUTS = ("dropout", "rank_dropout", "module_dropout")
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0)]


def has_kernel(shape: Sequence[int]) -> bool:
    """Return whether a weight belongs to a convolution with a kernel larger than 1 x 1.

    Args:
        shape: the weight's shape, [out, in] or [out, in, kh, kw].
    """
    return any(side > 1 for side in shape[2:])


class ModuleOverride(Section):
    """Rank, alpha and learning rate of some modules. Omitted keys keep the values that apply to all other modules."""

    match: Pattern = Field(
        description="A regular expression for whole module names with their component, such as "
        "unet\\.up_blocks\\..* or text_encoder_2\\..*."
    )
    rank: Rank | None = Field(None, description="Rank of the update.")
    alpha: Alpha | None = Field(None, description="Scale is alpha / rank; unset means lora.alpha, else the rank.")
    learning_rate: Rate | None = Field(None, description="Peak learning rate: the size of a change per update.")


RESERVED_STEM = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9])?", re.IGNORECASE)
"""Names, without extensions, that a file cannot have on Windows."""


def file_stem(token: str) -> str:
    """Return a token's file name, without extension: the token without the characters that file names cannot have."""
    return re.sub(r'[<>:"/\\|?*.]', "", token)


def _can_name_a_file(token: str) -> str:
    if RESERVED_STEM.fullmatch(file_stem(token)):
        what, fix = f"no file can be named after {token}", "Add letters: the embedding's file has the token's name."
        raise PydanticCustomError("rule", "{what}", {"what": what, "fix": fix, "at": []})
    return token


Token = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f]+$", max_length=64), AfterValidator(_can_name_a_file)]


class NewToken(Section):
    """A token that the vocabulary lacks. Each text encoder gets its own trained vectors for it."""

    token: Token = Field(
        description="The word to use in captions and prompts, without blanks, such as <zibu>. Upper and lower "
        "case are the same."
    )
    vectors: int = Field(1, gt=0, le=75, description="Number of vectors, each of which takes a token's place.")
    init: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Text of known words, such as creature. The vectors start at the mean of its tokens."
    )
    init_from: InputFile | None = Field(
        None, description="Embedding file (.safetensors) to start from, in place of init."
    )

    @property
    def file_stem(self) -> str:
        """File name of the token's embedding, without its extension."""
        return file_stem(self.token)

    @property
    def pattern(self) -> str:
        """Regular expression that finds the token as a whole word in normalised text.

        Python and tokenizers both accept it.
        """
        word = normalised(self.token)
        begin, end = (r"(?<!\w)" if word[0].isalnum() else ""), (r"(?!\w)" if word[-1].isalnum() else "")
        return begin + re.escape(word) + end

    def is_in(self, caption: str) -> bool:
        return re.search(self.pattern, normalised(caption)) is not None


def normalised(text: str) -> str:
    """Return a text as CLIP's tokenizers read it: in lower case, in the Unicode normal form NFC."""
    return unicodedata.normalize("NFC", text).lower()


class AdapterSection(Section):
    """The adapter: the keys that every kind of adapter reads.

    formats: the file formats in which this kind can be written (values of ``output.formats`` and ``export --format``).
    """

    formats: ClassVar[tuple[str, ...]] = ("kohya", "sd-scripts", "comfyui", "diffusers", "peft", MERGED, GGUF)

    type: str = Field(description="Kind of adapter: how the change of a weight is stored.")
    rank: int = Field(
        16,
        gt=0,
        le=MAX_RANK,
        description="Rank of the update. auto: the highest rank in the file of init_from, and its highest alpha unless "
        "alpha is given.",
    )
    alpha: float | None = Field(
        None, gt=0, le=100_000.0, description="Scale is alpha / rank; unset means alpha = rank."
    )
    dropout: Share = Field(
        0.0, description="Dropout on the adapter's input; for OFT and IA3 on the output that they change."
    )
    targets: Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        "attention-mlp",
        description="A preset, or regular expressions for module names. Presets: attention, attention-mlp; for models "
        "with convolutions attention-mlp-conv, for others all-linear.",
    )
    train_text_encoder: bool = Field(False, description="Also adapt the text encoders.")
    new_tokens: tuple[NewToken, ...] = Field(
        (),
        max_length=MAX_ITEMS,
        description="New tokens with vectors that are trained together with the adapter (pivotal tuning). Each is "
        "written as an embedding file next to the LoRA file.",
    )
    weight_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Dtype of the trained weights and their moments. bf16 and fp16 take less memory, but lose small "
        "updates. fp16 works only with optimizers that never keep second moments in fp16.",
    )
    init_from: InputFile | None = Field(
        None,
        description="Start from this file (kohya, diffusers or PEFT) of the same type. Modules of a lower rank are "
        "padded to rank, without a change of their effect.",
    )

    train_norms: bool = Field(
        False,
        description="Also train the norms of the components that are always trained: differences of their weights and "
        "biases, as LyCORIS' train_norm. LyCORIS and ComfyUI read such a file. Steps are slower because these norms "
        "are not fused.",
    )
    overrides: Annotated[tuple[ModuleOverride, ...], Field(max_length=MAX_OVERRIDES)] = Field(
        (), description="Other ranks, alphas and learning rates for some modules. The first entry that matches is used."
    )

    @property
    def tokenises(self) -> bool:
        """Whether the text encoders run in every training step. If so, captions are cached only as tokens."""
        return self.train_text_encoder or bool(self.new_tokens)

    @property
    def writable_formats(self) -> tuple[str, ...]:
        """The entries of ``formats`` that can store an adapter with these settings."""
        return tuple(form for form in self.formats if form in FORMS_WITH_NORMS or not self.train_norms)

    @property
    def title(self) -> str:
        """The adapter's usual name, such as "LoRA" or "DoRA"."""
        return self.type

    @property
    def size(self) -> str:
        """Text with the settings that determine the number and scale of the trained weights: "rank 16, alpha 16"."""
        return f"rank {self.rank}, alpha {self.effective_alpha:g}"

    @property
    def ranks(self) -> str:
        """Text with all rank settings, which determine the number of trained weights of each module."""
        others = [f"of {override.match} {override.rank}" for override in self.overrides if override.rank is not None]
        return ", ".join([f"rank {self.rank}", *others])

    @property
    def drops(self) -> tuple[str, ...]:
        """Names of the active dropout keys. Training draws random numbers for them."""
        return tuple(name for name in DROPOUTS if getattr(self, name, 0.0))

    @property
    def max_update_norm(self) -> float | None:
        """Largest allowed norm of a module's update, or None if it is not limited."""
        return None

    @property
    def reads_inputs(self) -> bool:
        """Whether the initial weights depend on the layers' inputs, which are then collected before the first step."""
        return False

    def unstarted_text(self, num_layers: int) -> str:
        """Return a notice that ``lora.init`` fills only a part of the ranks of some layers.

        Args:
            num_layers: number of these layers. If it is 0, the notice is empty.
        """
        return ""

    def at(self, override: ModuleOverride | None, shape: Sequence[int]) -> Self:
        """Return this section with the rank and the alpha of one module.

        Args:
            override: the entry of ``overrides`` that applies to the module, or None if no entry matches.
            shape: shape of the module's weight, [out, in] or [out, in, kh, kw].
        """
        if override is None:
            return self
        return self.model_copy(update={"rank": override.rank or self.rank, "alpha": override.alpha or self.alpha})

    def as_written(self) -> Self:
        """Return the section that describes the exported adapter. Its rank may differ from the trained rank."""
        return self

    def rate_factor(self, role: str) -> float:
        """Return the learning-rate factor for tensors of one role, such as "lora_B"."""
        return 1.0

    @property
    def effective_alpha(self) -> float:
        return float(self.rank if self.alpha is None else self.alpha)


class ProductSection(AdapterSection):
    """The keys of adapters that compute their update as a product of their tensors."""

    rank_dropout: Share = Field(
        0.0,
        description="LoRA: share of the ranks dropped for each sample of a batch; the others are scaled to the same "
        "mean. LoKr and LoHa, as in LyCORIS: share of a layer's outputs dropped for a batch.",
    )
    module_dropout: Share = Field(0.0, description="Share of the modules dropped for a batch.")
    scale_weight_norms: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Largest norm of a module's scaled update. After each step the tensors of a larger update are "
        "scaled down, all by the same factor; 1 is usual.",
    )

    @property
    def max_update_norm(self) -> float | None:
        return self.scale_weight_norms


class LoraSection(ProductSection):
    """The adapter."""

    type: Literal["lora"] = Field("lora", description="Kind of adapter: how the change of a weight is stored.")
    use_rslora: bool = Field(False, description="Rank-stabilised scale: alpha / sqrt(rank).")
    use_dora: bool = Field(False, description="Weight-decomposed LoRA (magnitude trained too).")
    conv_rank: Rank | None = Field(
        None, description="Rank of convolutions with kernels larger than 1 x 1; unset means rank."
    )
    conv_alpha: Alpha | None = Field(None, description="Alpha of these convolutions; unset means alpha, else the rank.")
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora", "eva"] = Field(
        "default",
        description="Initial factors A and B, as PEFT's init_lora_weights. default: A Kaiming uniform, B zero. "
        "gaussian: A normal, B zero. orthogonal: both random with the product zero. pissa (arXiv 2404.02948), olora "
        "(arXiv 2406.01775): both from the base's weight; the result has twice the rank. eva (arXiv 2410.07170): A "
        "from the inputs of linear layers in the first batches, B zero.",
    )
    loraplus_lr_ratio: float = Field(
        1.0, gt=0, le=10_000.0, description="LoRA+: learning rate of B as a multiple of A's; 16 is usual."
    )

    @property
    def title(self) -> str:
        return "DoRA" if self.use_dora else "LoRA"

    @property
    def writable_formats(self) -> tuple[str, ...]:
        return tuple(form for form in super().writable_formats if form != GGUF or not self.use_dora)

    @property
    def takes_off_start(self) -> bool:
        """Whether A and B are initialised from the base's weight.

        The exported adapter then subtracts their initial product.
        """
        return self.init in FROM_BASE

    @property
    def reads_inputs(self) -> bool:
        return self.init == "eva"

    def unstarted_text(self, num_layers: int) -> str:
        if not num_layers:
            return ""
        layers = "1 adapted layer, which has" if num_layers == 1 else f"{num_layers} adapted layers, which have"
        than = "inputs" if self.reads_inputs else "inputs or outputs"
        return (
            f"lora.init: {self.init} fills only a part of the ranks of {layers} fewer {than} than ranks. The other "
            "ranks start as by default. Use a lower rank there (lora.rank, or a rank in lora.overrides)."
        )

    def as_written(self) -> Self:
        if not self.takes_off_start:
            return self
        twice = [
            each.model_copy(update={"rank": each.rank and 2 * each.rank, "alpha": each.alpha and 2 * each.alpha})
            for each in self.overrides
        ]
        whole = {"init": "default", "rank": 2 * self.rank, "alpha": 2 * self.effective_alpha}
        conv = {key: getattr(self, key) and 2 * getattr(self, key) for key in ("conv_rank", "conv_alpha")}
        return self.model_copy(update={**whole, **conv, "overrides": tuple(twice)})

    @property
    def ranks(self) -> str:
        conv = [] if self.conv_rank is None else [f"of convolutions {self.conv_rank}"]
        start = [f"less the start ({self.init})"] if self.takes_off_start else []
        return ", ".join([super().ranks, *conv, *start])

    def at(self, override: ModuleOverride | None, shape: Sequence[int]) -> Self:
        rank, alpha = (self.conv_rank, self.conv_alpha) if has_kernel(shape) else (None, None)
        found = self.model_copy(update={"rank": rank or self.rank, "alpha": alpha or self.alpha})
        return super(LoraSection, found).at(override, shape)

    def rate_factor(self, role: str) -> float:
        return self.loraplus_lr_ratio if role == "lora_B" else 1.0


class LokrSection(ProductSection):
    """The adapter: LyCORIS' LoKr, a Kronecker product of two small matrices."""

    formats = ("kohya", "peft", MERGED)
    above_limit = {
        "rank": f"For a LoKr, {MAX_RANK} has the meaning of 10000 and 100000 in kohya's scripts: whole second factors, "
        f"of up to {2 * MAX_RANK} rows or columns."
    }

    type: Literal["lokr"] = Field("lokr", description="Kind of adapter: how the change of a weight is stored.")
    factor: int = Field(
        -1,
        ge=-1,
        le=MAX_RANK,
        description="Size of the first matrix. If it does not divide a side, the next smaller divisor is used. -1: "
        "near the square root of each side. LyCORIS refuses a file with a factor above the square root of a side.",
    )
    decompose_both: bool = Field(False, description="Factorise the first matrix to rank as well, if that is smaller.")

    @property
    def title(self) -> str:
        return "LoKr"


class LohaSection(ProductSection):
    """The adapter: LyCORIS' LoHa, the elementwise product of two low-rank matrices."""

    formats = ("kohya", "peft", MERGED)

    type: Literal["loha"] = Field("loha", description="Kind of adapter: how the change of a weight is stored.")

    @property
    def title(self) -> str:
        return "LoHa"


class OftSection(AdapterSection):
    """The adapter: LyCORIS' diag-oft, which rotates blocks of each layer's outputs. rank is the largest block size."""

    formats = ("kohya",)

    type: Literal["oft"] = Field("oft", description="Kind of adapter: how the change of a weight is stored.")
    constraint: float = Field(
        0.0,
        ge=0.0,
        le=100_000.0,
        description="Largest norm of a layer's rotation, as a share of its number of outputs; 0: no limit.",
    )

    @property
    def title(self) -> str:
        return "OFT"

    @property
    def size(self) -> str:
        return f"blocks of {self.rank} rows"


class Ia3Section(AdapterSection):
    """The adapter: LyCORIS' IA3, which scales each output of a layer by one number.

    A1111, SD.Next and LyCORIS read it.
    """

    formats = ("kohya",)

    type: Literal["ia3"] = Field("ia3", description="Kind of adapter: how the change of a weight is stored.")

    @property
    def title(self) -> str:
        return "IA3"

    @property
    def size(self) -> str:
        return "one number per output"


ADAPTERS: Mapping[str, type[AdapterSection]] = {
    "lora": LoraSection,
    "lokr": LokrSection,
    "loha": LohaSection,
    "oft": OftSection,
    "ia3": Ia3Section,
}
"""Section class of each value of ``lora.type``; the first is the default."""
