"""Muon (Jordan et al.; Liu et al., arXiv 2502.16982): orthogonalised momentum for matrices, AdamW for the rest.

The iteration runs in float32 because the matrices of a LoRA are small; PyTorch uses bfloat16. As in PyTorch, a weight
with two axes is a matrix, even with a single row or column.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lora_rocm.optim.stacks import StackedRule, WeightStack
from lora_rocm.optim.update_rule import Scalars, one_minus_power, write
from lora_rocm.recipe.optim_sections import MuonSection

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonal(matrices_nrc: Tensor, steps: int) -> Tensor:
    """Return approximations of the nearest matrices with orthogonal rows or columns, shape [n, r, c].

    ``steps``: number of Newton-Schulz iterations.
    """
    a, b, c = COEFFICIENTS
    wide = matrices_nrc.shape[-2] <= matrices_nrc.shape[-1]
    x: Tensor = matrices_nrc if wide else matrices_nrc.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.mT


class Muon(StackedRule[MuonSection]):
    """Muon on stacks of matrices. All state has the dtype of the weights."""

    tells_vectors: ClassVar[bool] = True

    def _allocate(self, scalars: Scalars) -> None:
        super()._allocate(scalars)
        dtype = self._weights.masters.dtype
        self._first = self._table("exp_avg", lambda stack: (stack.rows, stack.columns), dtype)
        self._second = self._table(
            "exp_avg_sq", lambda stack: (stack.rows, stack.columns) if stack.is_vector else None, dtype
        )

    def _update(
        self, number: int, gradients_nrc: Tensor, weights_nrc: Tensor, factor: float, steps: Tensor, hold: Tensor
    ) -> Tensor:
        section, stack = self._section, self.stacks[number]
        rate, decayed_nrc = stack.learning_rate * factor, weights_nrc.mul_(section.weight_decay)
        if stack.is_vector:
            return self._adamw(number, gradients_nrc, steps, hold).add_(decayed_nrc).mul_(rate)
        momentum_nrc = torch.lerp(gradients_nrc, self._first[number].float(), section.momentum)
        write(self._first[number], momentum_nrc, hold)
        if section.nesterov:
            momentum_nrc = torch.lerp(gradients_nrc, momentum_nrc, section.momentum)
        update_nrc = orthogonal(momentum_nrc, section.ns_steps)
        return (update_nrc * _shape_factor(stack, section.adjust_lr_fn)).add_(decayed_nrc).mul_(rate)

    def _adamw(self, number: int, gradients_nrc: Tensor, steps: Tensor, hold: Tensor) -> Tensor:
        (beta1, beta2), first, second = self._section.betas, self._first[number], self._second[number]
        means, squares = gradients_nrc * (1 - beta1), gradients_nrc.square_().mul_(1 - beta2)
        means.add_(first, alpha=beta1)
        squares.add_(second, alpha=beta2)
        update = means / one_minus_power(beta1, steps)
        update.div_((squares / one_minus_power(beta2, steps)).sqrt_().add_(self._section.epsilon))
        write(first, means, hold)
        write(second, squares, hold)
        return update


def _shape_factor(stack: WeightStack, adjust_lr_fn: str) -> float:
    """Return the factor by which Muon multiplies the update of a matrix of this shape."""
    if adjust_lr_fn == "original":
        return float(max(1.0, stack.rows / stack.columns) ** 0.5)
    return float(0.2 * max(stack.rows, stack.columns) ** 0.5)
