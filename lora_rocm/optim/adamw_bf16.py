"""AdamW for bf16 weights, in which small updates are not lost to rounding.

A step of 1e-4 times the weight is less than half of the distance to the next bf16 number, so rounding to nearest would
leave the weight unchanged. Stochastic rounding makes the full step on average (arXiv 2010.06192, section 4). Kahan
summation keeps the rounding error in a second bf16 number. The moments always use stochastic rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.optim.update_rule import Scalars, UpdateRule, one_minus_power, write
from lora_rocm.recipe.optim_sections import AdamwBf16Section

MOMENTS, LEFT_OUT = ("exp_avg", "exp_avg_sq"), "kahan"
WEIGHTS = 2  # random stream of the weights; the moments have 0 and 1


def round_by_chance(new_N: Tensor, dtype: torch.dtype, steps: Tensor, stream: int) -> Tensor:
    """Round float32 [N] stochastically to bf16 values, in place. Return the tensor, which is still float32.

    The random bits are a hash of position, step and stream, so they are the same on every device and after a resume.

    Args:
        new_N: numbers to round.
        dtype: dtype of the tensor that will store the numbers. If it is not bf16, they are not rounded.
        steps: number of the step, 0-d.
        stream: number that distinguishes the tensors rounded in one step.
    """
    if dtype is not torch.bfloat16:
        return new_N
    chance_N = torch.arange(new_N.numel(), dtype=torch.int32, device=new_N.device)
    chance_N.add_(steps.to(torch.int32) * 0x3C6EF35F + stream * 0x1B873593)
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1)):  # C. Wellons' hash lowbias32
        chance_N.bitwise_xor_((chance_N >> shift).bitwise_and_(0xFFFFFFFF >> shift)).mul_(factor)
    # bf16 is the upper 16 bits of float32
    new_N.view(torch.int32).add_(chance_N.bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
    return new_N


class AdamwBf16(UpdateRule[AdamwBf16Section]):
    """AdamW with moments in the dtype of the weights, computed in float32."""

    def _allocate(self, scalars: Scalars) -> None:
        names = (*MOMENTS, LEFT_OUT) if self._section.rounding == LEFT_OUT else MOMENTS
        self.buffers = {name: torch.zeros_like(self._weights.masters) for name in names}
        self._steps = scalars.add("step")

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        section, hold, masters_N = self._section, held > 0, self._weights.masters
        (beta1, beta2), steps, dtype = section.betas, self._steps + 1, masters_N.dtype
        gradients_N = self._weights.gradients.div_(divisor)
        squares_N = (gradients_N * gradients_N).mul_(1 - beta2).add_(self.buffers["exp_avg_sq"], alpha=beta2)
        means_N = gradients_N.mul_(1 - beta1).add_(self.buffers["exp_avg"], alpha=beta1)
        denominators_N = (squares_N / one_minus_power(beta2, steps)).sqrt_().add_(section.epsilon)
        update_N = (means_N / one_minus_power(beta1, steps)).div_(denominators_N)
        for stream, (name, new_N) in enumerate(zip(MOMENTS, (means_N, squares_N), strict=True)):
            write(self.buffers[name], round_by_chance(new_N, dtype, steps, stream), hold)
        update_N.add_(masters_N, alpha=section.weight_decay)
        for group in self._groups:
            update_N[group.place].mul_(factor * -group.learning_rate)
        update_N.add_(masters_N)
        left_N = self.buffers.get(LEFT_OUT)
        if left_N is None:
            update_N = round_by_chance(update_N, dtype, steps, WEIGHTS)
        else:
            update_N.add_(left_N)
            write(left_N, update_N - update_N.to(dtype), hold)
        write(masters_N, update_N, hold)
        write(self._steps, steps, hold)
