"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with PyTorch's fused kernel.

The fused kernel takes a ``found_inf`` tensor: if it is 1, parameters, moments and step count stay unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lora_rocm.optim.update_rule import Scalars, UpdateRule
from lora_rocm.recipe.optim_sections import AdamwSection

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(UpdateRule[AdamwSection]):
    """AdamW, with moments in the dtype of the weights.

    Unscaling and clipping need no extra pass, because the fused kernel divides the gradients by a number that covers
    both.

    Attributes:
        kernel: PyTorch's optimizer, with one parameter per group.
    """

    def _allocate(self, scalars: Scalars) -> None:
        self._parts = [nn.Parameter(self._weights.masters[group.place]) for group in self._groups]
        self.kernel = torch.optim.AdamW(
            [{"params": [part]} for part in self._parts],
            betas=self._section.betas,
            eps=self._section.epsilon,
            weight_decay=self._section.weight_decay,
            fused=True,
        )
        self.buffers = {name: torch.zeros_like(self._weights.masters) for name in MOMENTS}
        for number, (part, group) in enumerate(zip(self._parts, self._groups, strict=True)):
            # allocated here, so that an update cannot run out of memory
            self.kernel.state[part] = {"step": scalars.add(f"group{number}.step")} | {
                name: moment[group.place] for name, moment in self.buffers.items()
            }

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        gradients = self._weights.gradients
        for at_kernel, group, part in zip(self.kernel.param_groups, self._groups, self._parts, strict=True):
            at_kernel["lr"] = group.learning_rate * factor
            part.grad = gradients[group.place].to(part.dtype)
        # GradScaler's contract with fused optimizers
        self.kernel.found_inf, self.kernel.grad_scale = held, divisor  # type: ignore[attr-defined]
        self.kernel.step()
        for part in self._parts:
            part.grad = None
