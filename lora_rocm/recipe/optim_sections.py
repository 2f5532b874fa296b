"""The ``optim`` section of a recipe: the keys of all optimizers and schedules, and those of each optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from lora_rocm.recipe.sections import MAX_STEPS, Decay, Section, not_both

READ_BY_SCHEDULE: Mapping[str, tuple[str, ...]] = {
    "lr_scheduler_num_cycles": ("cosine_with_restarts",),
    "lr_scheduler_power": ("polynomial",),
    "lr_min_ratio": ("linear", "cosine", "cosine_with_restarts", "polynomial", "rex"),
}
"""Key of ``optim`` -> the values of ``lr_scheduler`` that read it."""


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
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "rex"] = Field(
        "constant", description="Shape after the warm-up. rex falls slowly at first (arXiv 2107.04197)."
    )
    lr_scheduler_num_cycles: int = Field(
        1, gt=0, le=MAX_STEPS, description="Number of times that cosine_with_restarts falls from the peak."
    )
    lr_scheduler_power: float = Field(1.0, gt=0, le=100.0, description="Power of polynomial; 1 is linear.")
    lr_min_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Where the schedule ends, as a share of the peak learning rate; not for constant."
    )
    lr_warmup_steps: int = Field(
        0, ge=0, le=MAX_STEPS, description="Linear warm-up: update i of w uses i / (w + 1) of the rate."
    )
    lr_warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="The warm-up as a share of the run, in place of lr_warmup_steps."
    )
    max_grad_norm: float = Field(1.0, ge=0, le=1e9, description="Clip the total gradient norm; 0 disables it.")

    @model_validator(mode="after")
    def _schedule_reads_its_keys(self) -> OptimSection:
        if self.lr_warmup_steps and self.lr_warmup_ratio:
            raise not_both("lr_warmup_steps", "lr_warmup_ratio")
        for key, readers in READ_BY_SCHEDULE.items():
            if getattr(self, key) != OptimSection.model_fields[key].default and self.lr_scheduler not in readers:
                what = f"{key} is not read with lr_scheduler: {self.lr_scheduler}"
                fix = f"Remove it, or set lr_scheduler to {' or '.join(readers)}."
                raise PydanticCustomError("rule", "{what}", {"what": what, "keys": [key], "fix": fix})
        return self

    def warmup_steps(self, max_train_steps: int) -> int:
        """The number of updates of the warm-up in a run of ``max_train_steps``."""
        return self.lr_warmup_steps or math.ceil(self.lr_warmup_ratio * max_train_steps)

    @property
    def text_rate(self) -> float:
        """The peak learning rate of the text encoders."""
        return self.text_encoder_learning_rate or self.learning_rate


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
        None, description="Decay of the sums behind the estimate; unset means the square root of the second beta."
    )
    epsilon: float = Field(1e-8, gt=0, le=1.0, description="Added to the denominator, times the estimate.")
    d0: float = Field(1e-6, gt=0, le=1.0, description="The estimate at the start.")
    d_coef: float = Field(1.0, gt=0, le=1000.0, description="Factor of the estimate; 0.5 and 2 are usual too.")
    use_bias_correction: bool = Field(False, description="Adam's bias correction of the moments.")
    safeguard_warmup: bool = Field(
        False,
        description="Prevent a warm-up of the learning rate (lr_warmup_steps) from raising the estimate.",
    )


OPTIMIZERS: Mapping[str, type[OptimSection]] = {"adamw": AdamwSection, "prodigy": ProdigySection}
"""The section of each ``optim.optimizer``; the first is that of a recipe that names none."""
