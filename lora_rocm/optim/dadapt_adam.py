"""D-Adaptation for Adam (Defazio and Mishchenko, arXiv 2301.07733): Adam that estimates its own step size.

The estimate ``d`` grows while new gradients agree with the sum of earlier gradients. The update is the same as in the
authors' package ``dadaptation`` with decoupled weight decay. That package copies two sums per weight to the host; here
``d`` and the sums stay on the device. The ratio of a group's learning rate to the recipe's corresponds to the package's
``layer_scale``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lora_rocm.optim.update_rule import Scalars, UpdateRule, one_minus_power, write
from lora_rocm.recipe.optim_sections import DAdaptAdamSection


class DAdaptAdam(UpdateRule[DAdaptAdamSection]):
    """Adam with D-Adaptation, computed in float32.

    The moments have the dtype of the weights. The sum of gradients is float32, because ``d`` depends on it.

    Attributes:
        d: estimate of the step size, 0-d; it never decreases.
    """

    def _allocate(self, scalars: Scalars) -> None:
        masters = self._weights.masters
        self.buffers = {
            "exp_avg": torch.zeros_like(masters),
            "exp_avg_sq": torch.zeros_like(masters),
            "s": torch.zeros_like(masters, dtype=torch.float32),
        }
        self.d = scalars.add("d", self._section.d0)
        self._numerator, self._steps = scalars.add("d_numerator"), scalars.add("step")
        self._effective_rate = torch.zeros_like(self.d)  # of the last step, for the log

    @property
    def logged(self) -> Mapping[str, Tensor]:
        return {"dadapt_d": self.d, "effective_learning_rate": self._effective_rate}

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        section, hold = self._section, held > 0
        (beta1, beta2), root = section.betas, math.sqrt(section.betas[1])
        first_N, second_N, sum_N = self.buffers.values()
        gradients_N, steps = self._weights.gradients.div_(divisor), self._steps + 1
        rate = self.d * (section.learning_rate * factor)
        if section.use_bias_correction:
            rate = rate * one_minus_power(beta2, steps).sqrt() / one_minus_power(beta1, steps)
        # Progress: how far the gradient continues in the direction of earlier gradients
        along_N = second_N.to(torch.float32, copy=True).sqrt_().add_(section.epsilon)
        torch.div(sum_N, along_N, out=along_N).mul_(gradients_N)
        progress = self._over_groups([along_N[group.place].sum() for group in self._groups]) * rate
        # The sum of gradients, and the two moments; the first moment includes the groups' rates
        write(sum_N, (gradients_N * (rate * (1 - root))).add_(sum_N, alpha=root), hold)
        squares_N = (gradients_N * gradients_N).mul_(1 - beta2).add_(second_N, alpha=beta2)
        for group in self._groups:
            gradients_N[group.place].mul_(rate * ((1 - beta1) * group.learning_rate / section.learning_rate))
        update_N = gradients_N.add_(first_N, alpha=beta1)
        write(first_N, update_N, hold)
        write(second_N, squares_N, hold)
        # The estimate
        size = self._over_groups([torch.linalg.vector_norm(sum_N[group.place], ord=1) for group in self._groups])
        numerator = self._numerator * root + (1 - root) * progress
        grown = numerator / ((1 - root) * size)
        if section.growth_rate is not None:
            grown = torch.minimum(grown, self.d * section.growth_rate)
        grown = torch.where(size > 0, torch.maximum(self.d, grown), self.d)  # no gradient so far
        # The weights
        masters_N = self._weights.masters
        update_N.div_(squares_N.sqrt_().add_(section.epsilon)).addcmul_(masters_N, rate * section.weight_decay)
        write(masters_N, torch.sub(masters_N, update_N, out=update_N), hold)
        for state, new in ((self._numerator, numerator), (self._steps, steps), (self.d, grown)):
            write(state, new, hold)
        self._effective_rate.copy_(rate)
