"""Prodigy (Mishchenko and Defazio, arXiv 2306.06101): Adam that estimates its own step size.

``d`` estimates the distance from the initial weights to a solution. It grows while the gradients keep pointing away
from the initial weights. The update is the same as in the authors' package ``prodigyopt`` with decoupled weight decay.
That package copies its sums to the host in each step; here ``d`` and the sums stay on the device, as 0-d tensors of the
state.

All weights share one ``d``. If a group has a multiple of the learning rate, its part of the denominator is multiplied
accordingly. This equals Prodigy with each weight divided by its group's multiple.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lora_rocm.optim.update_rule import Scalars, UpdateRule, one_minus_power, write
from lora_rocm.recipe.optim_sections import ProdigySection

MOMENTS, GRADIENT_SUM, START = ("exp_avg", "exp_avg_sq"), "s", "start"


class Prodigy(UpdateRule[ProdigySection]):
    """Prodigy over the flat weights, computed in float32.

    The moments and the initial weights have the dtype of the weights. The sum of gradients is always float32: bf16
    would round its decay away, and ``d`` depends on the sum.

    Attributes:
        d: estimate of the distance, 0-d; it never decreases.
    """

    def _allocate(self, scalars: Scalars) -> None:
        masters = self._weights.masters
        self.buffers = {
            **{name: torch.zeros_like(masters) for name in MOMENTS},
            GRADIENT_SUM: torch.zeros_like(masters, dtype=torch.float32),
            START: masters.detach().clone(),
        }
        self.d = scalars.add("d", self._section.d0)
        self._numerator, self._steps = scalars.add("d_numerator"), scalars.add("step")
        self._effective_rate = torch.zeros_like(self.d)  # of the last step, for the log

    @property
    def logged(self) -> Mapping[str, Tensor]:
        return {"prodigy_d": self.d, "effective_learning_rate": self._effective_rate}

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        hold, section = held > 0, self._section
        beta1, beta2 = section.betas
        beta3 = math.sqrt(beta2) if section.beta3 is None else section.beta3
        rate = self.d * (section.learning_rate * factor) * self._correction()
        # Progress: the inner product of the gradient and the distance from the start.
        gradients_N, masters_N = self._weights.gradients.div_(divisor), self._weights.masters
        spare_N = self.buffers[START].to(torch.float32, copy=True).sub_(masters_N)
        relative = self.d / section.d0  # relative to d0, because the square of d would be very small
        progress = spare_N.mul_(gradients_N).sum() * (relative * rate)

        # Running sums: of gradients, and the two moments.
        torch.mul(gradients_N, relative * (self.d if section.safeguard_warmup else rate), out=spare_N)
        self._renew(GRADIENT_SUM, spare_N, beta3, hold)
        torch.mul(gradients_N, self.d * (1 - beta1), out=spare_N)
        self._renew("exp_avg", spare_N, beta1, hold)
        torch.mul(gradients_N, self.d * math.sqrt(1 - beta2), out=spare_N).square_()
        self._renew("exp_avg_sq", spare_N, beta2, hold)

        # The new estimate d.
        numerator = self._numerator * beta3 + progress
        sum_N = self.buffers[GRADIENT_SUM]
        norms = [torch.linalg.vector_norm(sum_N[group.place], ord=1) for group in self._groups]
        denominator = self._over_groups(norms)
        grown = torch.maximum(self.d, section.d_coef * numerator / denominator)
        grown = torch.where(denominator > 0, grown, self.d)  # no gradient so far

        # The update of the weights.
        # spare_N holds the second moment, which is zero in the padding: avoid 0 / 0 there
        spare_N.sqrt_().add_((grown * section.epsilon).clamp(min=torch.finfo(torch.float32).tiny))
        torch.div(self.buffers["exp_avg"], spare_N, out=spare_N)
        self._descend(spare_N, rate / section.learning_rate, hold)
        write(self._numerator, numerator, hold)
        write(self._steps, self._steps + 1, hold)
        write(self.d, grown, hold)
        self._effective_rate.copy_(rate)

    def _correction(self) -> Tensor:
        """Return Adam's bias correction for the next step; 1 if the correction is disabled."""
        if not self._section.use_bias_correction:
            return torch.ones_like(self._steps)
        first, second = (one_minus_power(beta, self._steps + 1) for beta in self._section.betas)
        return second.sqrt() / first

    def _renew(self, name: str, added_N: Tensor, decay: float, hold: Tensor) -> None:
        """Multiply a running sum by ``decay``, then add ``added_N``. If ``hold`` is true, the sum is unchanged.

        ``added_N`` is overwritten with the new sum in float32.
        """
        write(self.buffers[name], added_N.add_(self.buffers[name], alpha=decay), hold)
