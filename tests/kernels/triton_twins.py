"""Run by ``test_triton.py`` in a separate process: prints the difference between each Triton kernel and its eager
implementation.

usage: triton_twins.py DEVICE [few]. Few: float32, and one size of each kernel. All: the proof at load as well. The
fingerprints of trained state are always compared bit for bit.

On the CPU Triton's interpreter runs the kernels (TRITON_INTERPRET=1 must be set before they are imported).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lora_rocm.checks.kernel_check import FINGERPRINTS, IN_FP16, SMALL, first_wrong
from lora_rocm.kernels.gated import gated
from lora_rocm.kernels.norms import add_layer_norm, group_norm, residual

DEVICE, FEW = torch.device(sys.argv[1]), sys.argv[2:] == ["few"]


def outcome(function: Callable[..., object], form: str, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs and gradients, in float64."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves, form)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    rng = torch.Generator().manual_seed(5)
    weighted = [(o.double() * torch.randn(o.shape, generator=rng).to(DEVICE)).sum() for o in outputs]
    sum(weighted).backward()  # type: ignore[union-attr]
    return [t.detach().double() for t in (*outputs, *(leaf.grad for leaf in leaves))]


def cases(dtype: torch.dtype) -> dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]]:
    """Name -> (function of the inputs and the implementation, inputs)."""

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape) + mean).to(DEVICE, dtype)

    rows, images = nn.LayerNorm(70), nn.GroupNorm(4, 72)
    for norm in (rows, images):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.requires_grad_(False).to(DEVICE, dtype)
    found: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
        "geglu": (lambda ag, f: gated("gelu", f, ag.clone()), (normal(3, 5, 140),)),
        "norm": (lambda x, f: add_layer_norm(x, None, rows, f), (normal(3, 5, 70, mean=3),)),
        "sum and norm": (lambda x, d, f: add_layer_norm(x, d, rows, f), (normal(4, 70, mean=3), normal(4, 70))),
        "residual": (lambda x, y, f: residual(x, y, images.bias, f), (normal(2, 72, 5, 8), normal(2, 72, 5, 8))),
    }
    for side in (5,) if FEW else (5, 9):
        x, shift = normal(2, 72, side, 8, mean=5), normal(2, 72)
        found[f"group norm, {side}"] = (lambda x, f: group_norm(x, images, f, silu=False), (x,))
        found[f"sum, group norm, silu, {side}"] = (lambda x, s, f: group_norm(x, images, f, s), (x, shift))
    return found


def main() -> None:
    torch.manual_seed(0)
    off = {}
    for dtype in (torch.float32,) if FEW else (torch.float32, torch.bfloat16):
        for name, (function, inputs) in cases(dtype).items():
            pairs = zip(outcome(function, "triton", inputs), outcome(function, "eager", inputs), strict=True)
            off[f"{name}, {dtype}"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    wrong = first_wrong(DEVICE, torch.float32, [FINGERPRINTS])
    assert wrong is None, wrong
    for dtype in () if FEW else (torch.float32, torch.float16, torch.bfloat16):
        wrong = first_wrong(DEVICE, dtype, (*SMALL, *IN_FP16[:1]))
        assert wrong is None, wrong
    sys.stdout.write(json.dumps(off) + "\n")


if __name__ == "__main__":
    main()
