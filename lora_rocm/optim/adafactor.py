"""Adafactor (Shazeer and Stern, arXiv 1804.04235): stores only the row and column means of a matrix's second moment.

The update is the same as in ``transformers``' class, which other trainers use. A weight with more than two axes is
treated as a matrix, with all axes after the first combined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.optim.stacks import StackedRule, factored, mean_square_root, renew_means
from lora_rocm.optim.update_rule import Scalars, write
from lora_rocm.recipe.optim_sections import AdafactorSection


class Adafactor(StackedRule[AdafactorSection]):
    """Adafactor on stacks of matrices. The means are float32; a first moment has the weights' dtype."""

    def _allocate(self, scalars: Scalars) -> None:
        super()._allocate(scalars)
        self._rows = self._table("exp_avg_sq_row", lambda stack: (stack.rows,))
        self._columns = self._table("exp_avg_sq_col", lambda stack: (stack.columns,))
        if self._section.beta1 is not None:
            self._first = self._table("exp_avg", lambda stack: (stack.rows, stack.columns), self._weights.masters.dtype)

    def _update(
        self, number: int, gradients_nrc: Tensor, weights_nrc: Tensor, factor: float, steps: Tensor, hold: Tensor
    ) -> Tensor:
        section, rows, columns = self._section, self._rows[number], self._columns[number]
        squares_nrc = gradients_nrc.square().add_(section.eps[0])
        renew_means({-1: rows, -2: columns}, squares_nrc, steps**section.decay_rate, hold)
        update_nrc = factored(rows, columns).mul_(gradients_nrc)
        update_nrc.div_((mean_square_root(update_nrc) / section.clip_threshold).clamp_(min=1.0))
        rate = self._rate(number, factor, steps)
        if section.scale_parameter:
            rate = rate * mean_square_root(weights_nrc).clamp_(min=section.eps[1])
        update_nrc.mul_(rate)
        if section.beta1 is not None:
            update_nrc.mul_(1 - section.beta1).add_(self._first[number], alpha=section.beta1)
            write(self._first[number], update_nrc, hold)
        return update_nrc.add_(weights_nrc.mul_(rate * section.weight_decay))

    def _rate(self, number: int, factor: float, steps: Tensor) -> Tensor:
        """Return the learning rate, 0-d. It comes from the schedule, or with ``relative_step`` from the step number."""
        if not self._section.relative_step:
            return torch.full_like(steps, self.stacks[number].learning_rate * factor)
        greatest = steps * 1e-6 if self._section.warmup_init else torch.full_like(steps, 1e-2)
        return torch.minimum(greatest, steps.rsqrt())
