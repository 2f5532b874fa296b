"""Schedule-free AdamW (Defazio et al., arXiv 2405.15682): an average of the steps takes the place of a schedule.

The trained weights y lie between the average x, which is the result, and the end z of the steps: y = b x + (1 - b) z.
So x follows from y and z, and only z is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_rocm.optim.update_rule import Group, Scalars, TrainedWeights, UpdateRule, one_minus_power, write
from lora_rocm.recipe.optim_sections import ScheduleFreeSection


class ScheduleFree(UpdateRule[ScheduleFreeSection]):
    """AdamW without a schedule, as the authors' package ``schedulefree`` computes it; all in float32.

    The learning rate counts in the average by its factor, which is the same for all groups.
    """

    def __init__(
        self, weights: TrainedWeights, groups: Sequence[Group], section: ScheduleFreeSection, scalars: Scalars
    ) -> None:
        super().__init__(weights, groups, section, scalars)
        self._end_N, self._second_N = (weights.masters.to(torch.float32, copy=True) for _ in range(2))
        self._second_N.zero_()
        self.buffers = {"z": self._end_N, "exp_avg_sq": self._second_N}
        self._steps, self._total = scalars.add("step"), scalars.add("weight_sum")

    @torch.no_grad()
    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        section, hold, masters_N = self._section, held > 0, self._weights.masters
        share, decay = section.betas
        steps = self._steps + 1
        weight = steps**section.r * factor**section.weight_lr_power
        total = self._total + weight
        newest = weight / total  # share of z in the average
        # The step of z: as Adam's, with the weight decay of y.
        gradients_N = self._weights.gradients.div_(divisor)
        second_N = (self._second_N * decay).addcmul_(gradients_N, gradients_N, value=1 - decay)
        write(self._second_N, second_N, hold)
        second_N.div_(one_minus_power(decay, steps)).sqrt_().add_(section.epsilon)
        step_N = gradients_N.div_(second_N).add_(masters_N, alpha=section.weight_decay)
        for group in self._groups:
            step_N[group.place].mul_(group.learning_rate * factor)
        # y follows x, which moves towards z, and z itself
        mixed_N = torch.lerp(masters_N.float(), self._end_N, newest).add_(step_N * (share * (1 - newest) - 1))
        write(masters_N, mixed_N, hold)
        write(self._end_N, torch.sub(self._end_N, step_N, out=step_N), hold)
        write(self._steps, steps, hold)
        write(self._total, total, hold)

    @torch.no_grad()
    def averaged(self) -> Tensor:
        return torch.lerp(self._weights.masters.float(), self._end_N, 1 - 1 / self._section.betas[0])
