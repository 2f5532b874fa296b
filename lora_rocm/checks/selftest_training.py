"""Self-test of training: ten LoRA steps of a small network, compared with the same steps on the CPU in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_rocm.checks.selftest_base import Check, WrongAnswerError, synchronize
from lora_rocm.device.precision import FLOATS

STEPS, RANK, LEARNING_RATE = 10, 16, 1e-3
TOLERANCES = {"bf16": 0.02, "fp16": 0.005}
"""Maximum error relative to the CPU's loss: two or three eps (0.0078, 0.00098), for several roundings in a row.
Averages over a batch reduce the error, and updates by slightly wrong gradients accumulate it (healthy hardware: 0.005,
0.0002).
"""


class Lora(nn.Module):
    """A frozen linear layer in the base's dtype, with a LoRA in float32."""

    def __init__(self, ins: int, outs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(outs, ins, generator=generator) / ins**0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, ins, generator=generator) / ins**0.5)
        self.up = nn.Parameter(torch.zeros(outs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base) + F.linear(F.linear(x, self.down), self.up)


def training_checks(device: torch.device) -> Iterator[Check]:
    """Yield one check for each 16-bit format."""
    tokens, width = (1024, 320) if device.type == "cuda" else (64, 32)
    for dtype in TOLERANCES:
        yield Check(f"training.lora-{dtype}", partial(_training, device, dtype, tokens, width))


def _network(tokens: int, width: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the network, its inputs, and targets that a LoRA can reach."""
    generator = torch.Generator().manual_seed(11)
    network = nn.Sequential(Lora(width, 4 * width, generator), nn.GELU(), Lora(4 * width, width, generator))
    x_TC = torch.randn(tokens, width, generator=generator)
    left, right = torch.randn(width, 2, generator=generator), torch.randn(2, width, generator=generator)
    with torch.no_grad():  # in float64, as all references
        change = left.double() @ right.double() / width
        wanted_TC = network.double()(x_TC.double()) + x_TC.double() @ change
    return network.float(), x_TC, wanted_TC.float()


def _losses(network: nn.Module, x_TC: Tensor, wanted_TC: Tensor, autocast: torch.dtype | None) -> list[float]:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    scale = 1024.0 if autocast is torch.float16 else 1.0  # avoids float16 underflow of small gradients
    losses = []
    for _ in range(STEPS):
        with torch.autocast(x_TC.device.type, autocast, enabled=autocast is not None):
            found_TC = network(x_TC)
        loss = F.mse_loss(found_TC.to(wanted_TC.dtype), wanted_TC)
        optimizer.zero_grad()
        (loss * scale).backward()
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@cache
def _known_losses(tokens: int, width: int) -> tuple[float, ...]:
    network, x_TC, wanted_TC = _network(tokens, width)
    return tuple(_losses(network.double(), x_TC.double(), wanted_TC.double(), None))


def _training(device: torch.device, dtype: str, tokens: int, width: int) -> None:
    known = _known_losses(tokens, width)
    network, x_TC, wanted_TC = _network(tokens, width)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for name, parameter in network.named_parameters():
        kept = FLOATS[dtype] if name.endswith("base") else torch.float32
        parameter.data = parameter.data.to(kept).to(device)
    found = _losses(network, x_TC.to(device), wanted_TC.to(device), FLOATS[dtype])
    synchronize(device)  # so that a fault is attributed to this check
    for step, (loss, wanted) in enumerate(zip(found, known, strict=True), 1):
        if not abs(loss - wanted) <= TOLERANCES[dtype] * wanted:  # written so that NaN is wrong, too
            raise WrongAnswerError(
                f"the loss of step {step} in {dtype} is {loss:.6g} instead of {wanted:.6g} (on the CPU)"
            )
    for name, parameter in network.named_parameters():
        after = parameter.detach().cpu()
        if parameter.requires_grad and not (after.isfinite().all() and (after != before[name]).any()):
            raise WrongAnswerError(f"after {STEPS} steps in {dtype}, {name} has not changed or is not finite")
