"""CAME (Luo et al., arXiv 2307.02047): Adafactor with a first moment that is scaled down where updates are unstable."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lora_rocm.optim.stacks import StackedRule, factored, mean_square_root, renew_means
from lora_rocm.optim.update_rule import Scalars, write
from lora_rocm.recipe.optim_sections import CameSection


class Came(StackedRule[CameSection]):
    """CAME on stacks of matrices. The means are float32; the first moment has the dtype of the weights."""

    tells_vectors: ClassVar[bool] = True

    def _allocate(self, scalars: Scalars) -> None:
        super()._allocate(scalars)
        self._first = self._table("exp_avg", lambda stack: (stack.rows, stack.columns), self._weights.masters.dtype)
        self._rows = self._table("exp_avg_sq_row", lambda stack: (stack.rows,))
        self._columns = self._table("exp_avg_sq_col", lambda stack: (stack.columns,))
        self._unstable = self._table(
            "exp_avg_res", lambda stack: None if stack.is_vector else (stack.rows + stack.columns,)
        )

    def _update(
        self, number: int, gradients_nrc: Tensor, weights_nrc: Tensor, factor: float, steps: Tensor, hold: Tensor
    ) -> Tensor:
        section, stack = self._section, self.stacks[number]
        rows, columns, (beta1, beta2, beta3) = self._rows[number], self._columns[number], section.betas
        renew_means({-1: rows, -2: columns}, gradients_nrc.square().add_(section.eps[0]), 1 - beta2, hold)
        update_nrc = factored(rows, columns).mul_(gradients_nrc)
        update_nrc.div_((mean_square_root(update_nrc) / section.clip_threshold).clamp_(min=1.0))
        first_nrc = (update_nrc * (1 - beta1)).add_(self._first[number], alpha=beta1)
        write(self._first[number], first_nrc, hold)
        if not stack.is_vector:
            unstable_nrc = update_nrc.sub_(first_nrc).square_().add_(section.eps[1])
            by_row, by_column = self._unstable[number].split([stack.rows, stack.columns], dim=1)
            renew_means({-1: by_row, -2: by_column}, unstable_nrc, 1 - beta3, hold)
            first_nrc.mul_(factored(by_row, by_column))
        return first_nrc.add_(weights_nrc, alpha=section.weight_decay).mul_(stack.learning_rate * factor)
