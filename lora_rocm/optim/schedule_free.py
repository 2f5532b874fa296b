"""Schedule-free AdamW (Defazio et al., arXiv 2405.15682): averaging the weights replaces a schedule.

z is the position that the optimizer steps reach, and x is the average of these positions, which is the result of the
training. The trained weights y are a mixture: y = b x + (1 - b) z. So x can be computed from y and z, and only z is
stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from lora_rocm.optim.update_rule import S, Scalars, UpdateRule, one_minus_power, state_name, write
from lora_rocm.recipe.optim_sections import ScheduleFreeSection

END = "z"
"""Name of the buffer that stores z."""


class AveragingRule(UpdateRule[S]):
    """Base class of the schedule-free rules. All state is float32. The first of the two ``betas`` is b.

    In the average x, each step has a weight that depends on the schedule's factor, which is the same for all groups.
    """

    def _allocate(self, scalars: Scalars) -> None:
        self._end_N, self._second_N = (self._weights.masters.to(torch.float32, copy=True) for _ in range(2))
        self._second_N.zero_()
        self.buffers = {END: self._end_N, "exp_avg_sq": self._second_N}
        self._steps, self._total = scalars.add("step"), scalars.add("weight_sum")

    @classmethod
    @abstractmethod
    def share(cls, section: S) -> float:
        """Return b, the share of the average x in the trained weights y."""

    def _follow(self, update_N: Tensor, rate: Tensor | float, weight: Tensor, hold: Tensor) -> None:
        """Make a step: move z by an update times the learning rates, and y accordingly.

        Args:
            update_N: update without weight decay, overwritten.
            rate: factor of the groups' learning rates.
            weight: weight of the new z in the average x, 0-d.
            hold: bool 0-d; if true, nothing changes.
        """
        masters_N, total = self._weights.masters, self._total + weight
        newest = weight / total
        update_N.add_(masters_N, alpha=self._section.weight_decay)
        for group in self._groups:
            update_N[group.place].mul_(rate * group.learning_rate)
        # y follows x, which moves towards z, and z itself
        mixed_N = torch.lerp(masters_N.float(), self._end_N, newest).add_(
            update_N * (self.share(self._section) * (1 - newest) - 1)
        )
        write(masters_N, mixed_N, hold)
        write(self._end_N, torch.sub(self._end_N, update_N, out=update_N), hold)
        write(self._steps, self._steps + 1, hold)
        write(self._total, total, hold)

    @classmethod
    @torch.no_grad()
    def averaged(cls, section: S, name: str, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the average x = y + (1 - 1/b) (z - y).

        ``lerp`` is not used, because its rounding depends on the device.
        """
        start = weight.float()
        return (state[state_name(name, END)] - start).mul_(1 - 1 / cls.share(section)).add_(start)


class ScheduleFree(AveragingRule[ScheduleFreeSection]):
    """Schedule-free AdamW. The update is the same as in the authors' package ``schedulefree``."""

    @classmethod
    def share(cls, section: ScheduleFreeSection) -> float:
        return section.betas[0]

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        section, hold, steps = self._section, held > 0, self._steps + 1
        decay, gradients_N = section.betas[1], self._weights.gradients.div_(divisor)
        second_N = (self._second_N * decay).addcmul_(gradients_N, gradients_N, value=1 - decay)
        write(self._second_N, second_N, hold)
        second_N.div_(one_minus_power(decay, steps)).sqrt_().add_(section.epsilon)
        weight = steps**section.r * factor**section.weight_lr_power
        self._follow(gradients_N.div_(second_N), factor, weight, hold)
