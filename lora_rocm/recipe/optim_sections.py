"""The ``optim`` section of a recipe: keys shared by all optimizers and schedules, and each optimizer's own keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from lora_rocm.recipe.sections import MAX_STEPS, AddedLater, Decay, Section

READ_BY_SCHEDULE: Mapping[str, tuple[str, ...]] = {
    "lr_scheduler_num_cycles": ("cosine_with_restarts",),
    "lr_cosine_steps": ("cosine",),
    "lr_scheduler_power": ("polynomial",),
    "lr_min_ratio": ("linear", "cosine", "cosine_with_restarts", "polynomial", "rex"),
}
"""The values of ``lr_scheduler`` that use each key of ``optim``."""


ARGUMENTS_KEY = "optimizer_args"
"""The key under which a user can give the optimizer's keys in the format of other trainers."""


def _describe_arguments(schema: JsonDict) -> None:
    """Add ``ARGUMENTS_KEY`` to a section's JSON Schema.

    It is not a field, because the loader replaces it by typed keys.
    """
    text: JsonDict = {"type": "array", "items": {"type": "string"}}
    description = (
        "Keys of the optimizer as kohya's scripts write them, such as [weight_decay=0.01, betas=0.9,0.99], or as a "
        "mapping: by their names here or in the optimizer's library."
    )
    properties = schema["properties"]
    assert isinstance(properties, dict)
    properties[ARGUMENTS_KEY] = {"anyOf": [text, {"type": "object"}], "default": [], "description": description}


Small = Annotated[float, Field(gt=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class OptimSection(Section):
    """Optimizer and schedule: the keys that every optimizer reads. Steps are optimizer updates.

    Attributes:
        usual_rates: lowest and highest learning rate that cause no notice.
        rate_advice: half a sentence about the optimizer's usual learning rate.
        published: library class known to users of other trainers, for the metadata.
        implied: arguments with which that class is always called.
        averages: whether the optimizer averages the weights and this average is the result.
        weight_dtypes: valid values of ``lora.weight_dtype``.
    """

    model_config = ConfigDict(json_schema_extra=_describe_arguments)
    usual_rates: ClassVar[tuple[float, float]] = (0.0, math.inf)
    rate_advice: ClassVar[str] = ""
    published: ClassVar[str] = ""
    implied: ClassVar[Mapping[str, object]] = {}
    averages: ClassVar[bool] = False
    weight_dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16")

    optimizer: str = Field(description="Optimizer: how a gradient changes the weights.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate: the size of a change per update.")
    text_encoder_learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate of the text encoders; unset means learning_rate."
    )
    embedding_learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate of lora.new_tokens; unset means text_encoder_learning_rate."
    )
    embedding_until_step: int = Field(
        0,
        ge=0,
        le=MAX_STEPS,
        description="Number of updates after which lora.new_tokens are no longer trained; 0: they always are.",
    )
    embedding_until_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="This number of updates as a share of the run, in place of embedding_until_step."
    )
    weight_decay: float = Field(
        0.01, ge=0, le=100.0, description="Decoupled weight decay: pulls the trained weights towards 0."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "rex"] = Field(
        "constant", description="Shape after the warm-up. rex falls slowly at first (arXiv 2107.04197)."
    )
    lr_scheduler_num_cycles: int = Field(
        1, gt=0, le=MAX_STEPS, description="Number of times that cosine_with_restarts falls from the peak."
    )
    lr_cosine_steps: int | None = Field(
        None,
        gt=0,
        le=MAX_STEPS,
        description="Updates from the warm-up to the minimum of cosine, like T_max of PyTorch's CosineAnnealingLR. "
        "After them the rate rises for the same number of updates, and so on. Unset: until the end of the run.",
    )
    lr_scheduler_power: float = Field(1.0, gt=0, le=100.0, description="Power of polynomial; 1 is linear.")
    lr_min_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Learning rate at the end of the schedule, as a share of its peak; not for constant."
    )
    lr_warmup_steps: int = Field(
        0, ge=0, le=MAX_STEPS, description="Linear warm-up: update i of w uses i / (w + 1) of the rate."
    )
    lr_warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="The warm-up as a share of the run, in place of lr_warmup_steps."
    )
    lr_warmup_from_zero: Annotated[bool, AddedLater()] = Field(
        False,
        description="Begin the warm-up at 0, as transformers and diffusers do: update i of w uses (i - 1) / w of the "
        "rate, so the first update changes nothing.",
    )
    max_grad_norm: float = Field(1.0, ge=0, le=1e9, description="Clip the total gradient norm to this; 0 disables it.")

    def warmup_steps(self, max_train_steps: int) -> int:
        """Return the number of warm-up updates of a run with ``max_train_steps`` updates."""
        return self.lr_warmup_steps or math.ceil(self.lr_warmup_ratio * max_train_steps)

    @property
    def embedding_until_key(self) -> str:
        """Name of the key that is set, either embedding_until_step or embedding_until_ratio; empty if neither is."""
        return next((key for key in ("embedding_until_step", "embedding_until_ratio") if getattr(self, key)), "")

    def embedding_until(self, max_train_steps: int) -> int | None:
        """Return the number of updates after which new tokens are no longer trained, or None if they always are."""
        if not self.embedding_until_key:
            return None
        return self.embedding_until_step or math.ceil(self.embedding_until_ratio * max_train_steps)

    @property
    def text_rate(self) -> float:
        """Peak learning rate of the text encoders."""
        return self.text_encoder_learning_rate or self.learning_rate

    @property
    def embedding_rate(self) -> float:
        """Peak learning rate of new tokens."""
        return self.embedding_learning_rate or self.text_rate

    @classmethod
    def arguments(cls) -> list[str]:
        """Return the keys that are passed to the optimizer itself: its own keys and the weight decay."""
        return ["weight_decay", *(name for name in cls.model_fields if name not in OptimSection.model_fields)]

    @property
    def description(self) -> str:
        """Optimizer class and arguments, in the format of kohya's metadata field ``ss_optimizer``."""
        values = {name: getattr(self, name) for name in self.arguments()}
        given = {"eps" if name == "epsilon" else name: value for name, value in values.items()}
        return f"{self.published}({','.join(f'{name}={value}' for name, value in {**self.implied, **given}.items())})"


BETAS = "Decay rates of the two moments."
EPSILON = "Constant added to the denominator."


class AdamwSection(OptimSection):
    """Optimizer and schedule. Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-2)
    rate_advice: ClassVar[str] = (
        "which usually takes 1.0e-4. Rates near 1 are meant for Prodigy: for that set optim.optimizer: prodigy."
    )

    published: ClassVar[str] = "torch.optim.AdamW"

    optimizer: Literal["adamw"] = Field("adamw", description="Optimizer: how a gradient changes the weights.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description=BETAS)
    epsilon: float = Field(1e-8, gt=0, le=1.0, description=EPSILON)


class EstimatedRateSection(OptimSection):
    """An optimizer that estimates the learning rate."""

    usual_rates: ClassVar[tuple[float, float]] = (1e-2, 10.0)
    implied: ClassVar[Mapping[str, object]] = {"decouple": True}

    learning_rate: float = Field(1.0, gt=0, description="Factor of the estimated learning rate.")
    text_encoder_learning_rate: float | None = Field(
        None, gt=0, description="Factor for the text encoders; unset means learning_rate."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description=BETAS)


class ProdigyKeys(EstimatedRateSection):
    """The keys shared by Prodigy (arXiv 2306.06101) with and without a schedule."""

    rate_advice: ClassVar[str] = (
        "which estimates the learning rate itself and takes 1.0 as its factor. Tune it with optim.d_coef."
    )

    beta3: Decay | None = Field(
        None, description="Decay rate of the sums behind the estimate; unset means the square root of the second beta."
    )
    epsilon: float = Field(1e-8, gt=0, le=1.0, description="Constant added to the denominator, times the estimate.")
    d0: float = Field(1e-6, gt=0, le=1.0, description="The estimate at the start.")
    d_coef: float = Field(1.0, gt=0, le=1000.0, description="Factor of the estimate; 0.5 and 2 are usual too.")


class ProdigySection(ProdigyKeys):
    """Prodigy estimates the learning rate itself (arXiv 2306.06101). Steps are optimizer updates."""

    published: ClassVar[str] = "prodigyopt.prodigy.Prodigy"

    optimizer: Literal["prodigy"] = Field("prodigy", description="Optimizer: how a gradient changes the weights.")
    use_bias_correction: bool = Field(False, description="Adam's bias correction of the moments.")
    safeguard_warmup: bool = Field(
        False, description="Prevent a warm-up of the learning rate (lr_warmup_steps) from raising the estimate."
    )


class Adamw8bitSection(AdamwSection):
    """AdamW with 8-bit moments, quantised in blocks of 256 (arXiv 2110.02861). Steps are optimizer updates."""

    published: ClassVar[str] = "bitsandbytes.optim.AdamW8bit"
    weight_dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")

    optimizer: Literal["adamw_8bit"] = Field("adamw_8bit", description="Optimizer: how a gradient changes the weights.")  # type: ignore[assignment]


class LionSection(OptimSection):
    """Lion, which uses only the sign of a momentum (arXiv 2302.06675). Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-3)
    rate_advice: ClassVar[str] = "which usually takes a third to a tenth of AdamW's rate, such as 3.0e-5."
    published: ClassVar[str] = "lion_pytorch.lion_pytorch.Lion"

    optimizer: Literal["lion"] = Field("lion", description="Optimizer: how a gradient changes the weights.")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.99), description="Share of the momentum in the sign, and decay rate of the momentum."
    )


class AdafactorSection(OptimSection):
    """Adafactor, with second moments factored into rows and columns (arXiv 1804.04235). Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-2)
    rate_advice: ClassVar[str] = "which takes rates like AdamW's; with scale_parameter up to 1.0e-2."
    published: ClassVar[str] = "transformers.optimization.Adafactor"
    weight_dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")

    optimizer: Literal["adafactor"] = Field("adafactor", description="Optimizer: how a gradient changes the weights.")
    eps: tuple[Small, Small] = Field(
        (1e-30, 1e-3),
        description="Constant added to squared gradients, and lowest size of weights for scale_parameter.",
    )
    clip_threshold: float = Field(1.0, gt=0, le=1e9, description="Largest root mean square of an update.")
    decay_rate: float = Field(
        -0.8, lt=0, ge=-10.0, description="Exponent of the step number in the second moment's decay."
    )
    beta1: Decay | None = Field(None, description="Decay rate of a first moment; unset means no first moment.")
    scale_parameter: bool = Field(False, description="Multiply the rate by the root mean square of each weight.")
    relative_step: bool = Field(
        False, description="Use the rate 1 / sqrt(step), at most 0.01, in place of learning_rate and lr_scheduler."
    )
    warmup_init: bool = Field(False, description="With relative_step: the rate starts at step * 1e-6.")


class CameSection(OptimSection):
    """CAME, which is Adafactor with a confidence-guided update (arXiv 2307.02047). Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-2)
    rate_advice: ClassVar[str] = "which usually takes 1.0e-4."
    published: ClassVar[str] = "came_pytorch.CAME"
    weight_dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")

    optimizer: Literal["came"] = Field("came", description="Optimizer: how a gradient changes the weights.")
    betas: tuple[Decay, Decay, Decay] = Field(
        (0.9, 0.999, 0.9999), description="Decay rates of the update, the second moment and the instability."
    )
    eps: tuple[Small, Small] = Field(
        (1e-30, 1e-16), description="Constants added to squared gradients and to the instability."
    )
    clip_threshold: float = Field(1.0, gt=0, le=1e9, description="Largest root mean square of an update.")


class ScheduleFreeSection(OptimSection):
    """AdamW with weight averaging in place of a schedule (arXiv 2405.15682). Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-1)
    rate_advice: ClassVar[str] = "which takes one to ten times AdamW's rate, such as 5.0e-4."
    published: ClassVar[str] = "schedulefree.AdamWScheduleFree"
    averages: ClassVar[bool] = True
    weight_dtypes: ClassVar[tuple[str, ...]] = ("fp32",)

    optimizer: Literal["adamw_schedule_free"] = Field(
        "adamw_schedule_free", description="Optimizer: how a gradient changes the weights."
    )
    betas: tuple[Share, Decay] = Field(
        (0.9, 0.999), description="Share of the average in the trained weights, and decay rate of the second moment."
    )
    epsilon: float = Field(1e-8, gt=0, le=1.0, description=EPSILON)
    r: float = Field(0.0, ge=0, le=100.0, description="Exponent of the step number in the weights of the average.")
    weight_lr_power: float = Field(
        2.0, ge=0, le=100.0, description="Exponent of the learning rate in the weights of the average, for the warm-up."
    )


class ProdigyScheduleFreeSection(ProdigyKeys):
    """Prodigy with weight averaging in place of a schedule. Steps are optimizer updates."""

    published: ClassVar[str] = "prodigyplus.ProdigyPlusScheduleFree"
    implied: ClassVar[Mapping[str, object]] = {"factored": False, "use_stableadamw": False, "split_groups": False}
    averages: ClassVar[bool] = True
    weight_dtypes: ClassVar[tuple[str, ...]] = ("fp32",)

    optimizer: Literal["prodigy_schedule_free"] = Field(
        "prodigy_schedule_free", description="Optimizer: how a gradient changes the weights."
    )
    betas: tuple[Share, Decay] = Field(
        (0.9, 0.99), description="Share of the average in the trained weights, and decay rate of the second moment."
    )
    d_limiter: bool = Field(True, description="Limit the growth of the estimate to a fifth per update.")


class DAdaptAdamSection(EstimatedRateSection):
    """Adam with D-Adaptation, which estimates the learning rate (arXiv 2301.07733). Steps are optimizer updates."""

    rate_advice: ClassVar[str] = "which estimates the learning rate itself and takes 1.0 as its factor."
    published: ClassVar[str] = "dadaptation.dadapt_adam.DAdaptAdam"

    optimizer: Literal["dadapt_adam"] = Field(
        "dadapt_adam", description="Optimizer: how a gradient changes the weights."
    )
    epsilon: float = Field(1e-8, gt=0, le=1.0, description=EPSILON)
    d0: float = Field(1e-6, gt=0, le=1.0, description="The estimate at the start.")
    growth_rate: float | None = Field(
        None,
        gt=1.0,
        le=1e9,
        description="Largest growth of the estimate per update, such as 1.02; unset means no limit.",
    )
    use_bias_correction: bool = Field(False, description="Adam's bias correction of the rate.")


class MuonSection(OptimSection):
    """Muon for matrices, AdamW for other weights (arXiv 2502.16982). Steps are optimizer updates."""

    usual_rates: ClassVar[tuple[float, float]] = (0.0, 1e-1)
    rate_advice: ClassVar[str] = "which takes AdamW's rate with adjust_lr_fn: match_rms_adamw, such as 1.0e-4."
    published: ClassVar[str] = "torch.optim.Muon"

    optimizer: Literal["muon"] = Field("muon", description="Optimizer: how a gradient changes the weights.")
    momentum: Decay = Field(0.95, description="Decay rate of the momentum of matrices.")
    nesterov: bool = Field(True, description="Nesterov's momentum.")
    ns_steps: int = Field(5, gt=0, le=100, description="Steps of the Newton-Schulz iteration.")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw", description="Scaling of the rate by a matrix's shape; original needs rates near 0.02."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay rates of AdamW's two moments.")
    epsilon: float = Field(1e-8, gt=0, le=1.0, description="Constant added to AdamW's denominator.")


class AdamwBf16Section(AdamwSection):
    """AdamW for lora.weight_dtype: bf16, without losing small updates to rounding. Steps are optimizer updates."""

    published: ClassVar[str] = "lora_rocm.AdamWBF16"
    weight_dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    optimizer: Literal["adamw_bf16"] = Field("adamw_bf16", description="Optimizer: how a gradient changes the weights.")  # type: ignore[assignment]
    rounding: Literal["stochastic", "kahan"] = Field(
        "stochastic",
        description="stochastic: round the weights up or down at random. kahan: keep the rounding error (2 more bytes "
        "per weight).",
    )


SECTIONS: tuple[type[OptimSection], ...] = (
    AdamwSection,
    Adamw8bitSection,
    AdamwBf16Section,
    ScheduleFreeSection,
    AdafactorSection,
    CameSection,
    LionSection,
    MuonSection,
    ProdigySection,
    ProdigyScheduleFreeSection,
    DAdaptAdamSection,
)
OPTIMIZERS: Mapping[str, type[OptimSection]] = {each.model_fields["optimizer"].default: each for each in SECTIONS}
"""Section class of each value of ``optim.optimizer``; the first is the default."""
