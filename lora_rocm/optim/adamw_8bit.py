"""AdamW with 8-bit moments (Dettmers et al., arXiv 2110.02861), in plain operations on the device.

Each block of 256 neighbouring numbers has one scale, its largest magnitude. A number divided by its scale is stored as
the index of the nearest of 256 fixed values. The values are between -1 and 1 for the first moment, and between 0 and 1
for the second. They are dense near zero, and the same as in bitsandbytes. Blocks divide the flat weights. So a block
may contain the end of one weight and the start of the next, and even small weights are stored in 8 bits.

bitsandbytes' kernel (``optimizer_update_8bit_blockwise`` of 0.50) is not used. It takes the step number, the learning
rate and the gradient factor as host numbers, and it cannot skip an update. Here clipping, loss scale and the decision
to skip an update are known only on the device, so each step would have to synchronise. Moreover, a captured graph would
repeat the step number of its capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.device.constants import constant
from lora_rocm.optim.update_rule import TABLE_MULTIPLE, Scalars, UpdateRule, one_minus_power, write
from lora_rocm.recipe.optim_sections import Adamw8bitSection

BLOCK, EXPONENTS = 256, 7


def code_book(signed: bool) -> Tensor:
    """Return the 256 values that a code can have, float32 in ascending order.

    Each decade is divided into equal intervals, twice as many as in the decade below. The values are the centres of the
    intervals, and 0 and 1. If ``signed``, the negative centres are included.
    """
    middles = []
    for exponent in range(EXPONENTS):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        middles.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - EXPONENTS + 1))
    positive = torch.cat(middles)
    both = [-positive, positive] if signed else [positive]
    return torch.cat([*both, torch.tensor([0.0, 1.0])]).sort().values


class QuantisedMoment:
    """A moment of P numbers, stored in 8 bits each.

    Args:
        codes_P: uint8 [P], indices into the code book.
        scales: float32, at least P / BLOCK numbers.
        signed: whether the numbers may be negative.
    """

    def __init__(self, codes_P: Tensor, scales: Tensor, signed: bool) -> None:
        self._codes_P, self._scales_B1 = codes_P, scales[: len(codes_P) // BLOCK, None]
        book = code_book(signed)
        edges = (book[1:] + book[:-1]) / 2
        self._values_C = constant(book.to(codes_P.device), "code book of adamw_8bit")
        self._edges_C = constant(edges.to(codes_P.device), "edges of the code book of adamw_8bit")
        self._codes_P.fill_(int(book.abs().argmin()))  # the index of 0

    def read(self) -> Tensor:
        """Return the decoded numbers, float32 [P]."""
        values_P = self._values_C.index_select(0, self._codes_P.int())
        return values_P.view(-1, BLOCK).mul_(self._scales_B1).view(-1)

    def write(self, new_P: Tensor, hold: Tensor) -> None:
        """Encode and store these numbers, unless ``hold`` is true."""
        new_BK = new_P.view(-1, BLOCK)
        scales_B1 = new_BK.abs().amax(1, keepdim=True)
        shares_BK = new_BK / scales_B1.clamp(min=torch.finfo(torch.float32).tiny)
        codes_BK = torch.bucketize(shares_BK, self._edges_C, out_int32=True).to(torch.uint8)
        write(self._codes_P, codes_BK.view(-1), hold)
        write(self._scales_B1, scales_B1, hold)


class Adamw8bit(UpdateRule[Adamw8bitSection]):
    """AdamW with 8-bit moments, computed in float32."""

    def _allocate(self, scalars: Scalars) -> None:
        masters = self._weights.masters
        blocks = -(-len(masters) // BLOCK)
        width = -(-blocks // TABLE_MULTIPLE) * TABLE_MULTIPLE
        self.buffers = {
            name: masters.new_zeros(blocks * BLOCK, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")
        }
        self.tables = {"scales": masters.new_zeros(2 * width, dtype=torch.float32)}
        first_W, second_W = self.tables["scales"].view(2, width)
        self._first = QuantisedMoment(self.buffers["exp_avg"], first_W, signed=True)
        self._second = QuantisedMoment(self.buffers["exp_avg_sq"], second_W, signed=False)
        self._steps = scalars.add("step")

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        section, hold, (beta1, beta2) = self._section, held > 0, self._section.betas
        gradients_N, steps = self._weights.gradients.div_(divisor), self._steps + 1
        first_P, second_P = self._first.read(), self._second.read()
        first_N, second_N = first_P[: len(gradients_N)], second_P[: len(gradients_N)]
        first_N.mul_(beta1).add_(gradients_N, alpha=1 - beta1)
        second_N.mul_(beta2).addcmul_(gradients_N, gradients_N, value=1 - beta2)
        self._first.write(first_P, hold)
        self._second.write(second_P, hold)
        second_N.sqrt_().div_(one_minus_power(beta2, steps).sqrt_()).add_(section.epsilon)
        self._descend(first_N.div_(second_N).div_(one_minus_power(beta1, steps)), factor, hold)
        write(self._steps, steps, hold)
