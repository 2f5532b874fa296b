"""Prodigy's step size estimate in schedule-free Adam: neither a learning rate nor a schedule has to be chosen.

The update is the same as in the package ``prodigy-plus-schedule-free`` without factors, StableAdamW and slices. The
estimate ``d`` uses all weights, which share it. The distance from the initial weights is measured at z, the result of
the steps without averaging.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lora_rocm.optim.schedule_free import AveragingRule
from lora_rocm.optim.update_rule import Scalars, write
from lora_rocm.recipe.optim_sections import ProdigyScheduleFreeSection

LIMIT = 2**0.25
"""Largest factor by which the estimate may grow per update, if ``d_limiter`` is set."""


class ProdigyScheduleFree(AveragingRule[ProdigyScheduleFreeSection]):
    """Schedule-free Adam with Prodigy's step size estimate.

    Attributes:
        d: estimate of the distance, 0-d; it never decreases.
    """

    def _allocate(self, scalars: Scalars) -> None:
        super()._allocate(scalars)
        self._start_N, self._sum_N = self._end_N.clone(), torch.zeros_like(self._end_N)
        self.buffers = {**self.buffers, "start": self._start_N, "s": self._sum_N}
        self.d, self._numerator = scalars.add("d", self._section.d0), scalars.add("d_numerator")
        self._effective_rate = torch.zeros_like(self.d)  # of the last step, for the log

    @property
    def logged(self) -> Mapping[str, Tensor]:
        return {"prodigy_d": self.d, "effective_learning_rate": self._effective_rate}

    @classmethod
    def share(cls, section: ProdigyScheduleFreeSection) -> float:
        return section.betas[0]

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        section, hold, decay = self._section, held > 0, self._section.betas[1]
        beta3 = math.sqrt(decay) if section.beta3 is None else section.beta3
        gradients_N, scale = self._weights.gradients.div_(divisor), self.d * self.d / math.sqrt(section.d0)
        # The new estimate
        progress = (self._start_N - self._end_N).mul_(gradients_N).sum() * scale
        write(self._sum_N, (gradients_N * scale).add_(self._sum_N, alpha=beta3), hold)
        norms = [torch.linalg.vector_norm(self._sum_N[group.place], ord=1) for group in self._groups]
        away, size = (self.d > section.d0) | (progress > 0), self._over_groups(norms)
        # at the start, negative progress is ignored
        numerator = self._numerator * beta3 + torch.where(away, progress, 0.0)
        grown = numerator / size
        if section.d_limiter:
            grown = torch.minimum(grown, self.d * LIMIT)
        grown = torch.where(size > 0, torch.maximum(self.d, grown * section.d_coef), self.d)  # no gradient so far
        # The weights, with the previous estimate
        gradients_N.mul_(self.d)
        second_N = (self._second_N * decay).addcmul_(gradients_N, gradients_N, value=1 - decay)
        write(self._second_N, second_N, hold)
        update_N = gradients_N.div_(second_N.sqrt_().add_(self.d * section.epsilon))
        rate = self.d * factor
        self._effective_rate.copy_(rate * section.learning_rate)
        self._follow(update_N, rate, rate * rate, hold)
        write(self._numerator, numerator, hold)
        write(self.d, grown, hold)
