"""Lion (Chen et al., arXiv 2302.06675): each weight moves by the sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.optim.update_rule import Scalars, UpdateRule, write
from lora_rocm.recipe.optim_sections import LionSection


class Lion(UpdateRule[LionSection]):
    """Lion, computed in float32. The momentum has the dtype of the weights."""

    def _allocate(self, scalars: Scalars) -> None:
        self.buffers = {"exp_avg": torch.zeros_like(self._weights.masters)}

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        (share, decay), momentum_N, hold = self._section.betas, self.buffers["exp_avg"], held > 0
        gradients_N = self._weights.gradients.div_(divisor)
        self._descend((gradients_N * (1 - share)).add_(momentum_N, alpha=share).sign_(), factor, hold)
        write(momentum_N, gradients_N.mul_(1 - decay).add_(momentum_N, alpha=decay), hold)
