"""The ``lora`` section of a recipe: the keys of all adapters, and those of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lora_rocm.recipe.sections import MAX_ITEMS, MAX_RANK, InputFile, Section, refuse_unread

Pattern = Annotated[str, Field(min_length=1)]  # an empty expression matches no module


class AdapterSection(Section):
    """The adapter: the keys that every kind of adapter reads.

    formats: the values of ``output.formats`` in which the adapter can be written.
    """

    formats: ClassVar[tuple[str, ...]] = ("kohya", "sd-scripts", "comfyui", "diffusers", "peft")

    type: str = Field(description="Kind of adapter.")
    rank: int = Field(16, gt=0, le=MAX_RANK, description="Rank of the update.")
    alpha: float | None = Field(
        None, gt=0, le=100_000.0, description="Scale is alpha / rank; unset means alpha = rank."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Dropout on the adapter's input.")
    targets: Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        "attention-mlp",
        description="A preset (attention, attention-mlp, attention-mlp-conv) or regular expressions of module names.",
    )
    train_text_encoder: bool = Field(False, description="Also adapt the text encoders.")
    weight_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of the trained weights and their moments. bf16 takes less memory, but loses small updates.",
    )
    init_from: InputFile | None = Field(
        None,
        description="Start from this file (kohya, diffusers or PEFT) of the same type. Modules of a lower rank are "
        "padded to rank; the effect is that of the file.",
    )

    @property
    def title(self) -> str:
        """The usual name of the adapter."""
        return self.type

    @property
    def size(self) -> str:
        """What decides the number of trained weights, and their scale, in words."""
        return f"rank {self.rank}, alpha {self.effective_alpha:g}"

    @property
    def needs_dense(self) -> str:
        """The key because of which the base has to be dense; empty if a quantised base is possible."""
        return ""

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

    @property
    def needs_dense(self) -> str:
        return "use_dora" if self.use_dora else ""


class LokrSection(AdapterSection):
    """The adapter: LyCORIS' LoKr, a Kronecker product of two small matrices."""

    formats = ("kohya", "peft")

    type: Literal["lokr"] = Field("lokr", description="Kind of adapter.")
    factor: int = Field(
        -1,
        ge=-1,
        le=MAX_RANK,
        description="Size of the first matrix. If it does not divide a side, the next smaller divisor is used. -1: "
        "near the square root of each side.",
    )
    decompose_both: bool = Field(False, description="Factorise the first matrix to rank as well, if that is smaller.")

    @property
    def title(self) -> str:
        return "LoKr"


class LohaSection(AdapterSection):
    """The adapter: LyCORIS' LoHa, the product, entry by entry, of two low-rank products."""

    formats = ("kohya", "peft")

    type: Literal["loha"] = Field("loha", description="Kind of adapter.")

    @property
    def title(self) -> str:
        return "LoHa"


class OftSection(AdapterSection):
    """The adapter: LyCORIS' diag-oft, which rotates blocks of each layer's outputs. rank is the largest block."""

    formats = ("kohya",)

    type: Literal["oft"] = Field("oft", description="Kind of adapter.")
    constraint: float = Field(
        0.0,
        ge=0.0,
        le=100_000.0,
        description="Largest norm of a layer's rotation, as a share of its number of outputs; 0: no limit.",
    )

    @model_validator(mode="after")
    def _without_scale(self) -> OftSection:
        refuse_unread(self, ("alpha",), "on an OFT: a rotation has no scale", "Remove it.")
        return self

    @property
    def title(self) -> str:
        return "OFT"

    @property
    def size(self) -> str:
        return f"blocks of {self.rank} rows"


ADAPTERS: Mapping[str, type[AdapterSection]] = {
    "lora": LoraSection,
    "lokr": LokrSection,
    "loha": LohaSection,
    "oft": OftSection,
}
"""The section of each ``lora.type``; the first is the default."""
