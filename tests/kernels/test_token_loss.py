"""The eager implementation of the token loss, which writes its gradient over the logits, compared with autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from lora_rocm.kernels.token_loss import to_loss_gradient

IGNORED = -100


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.5, 2.0)])
def test_losses_and_gradients_are_those_of_autograd(
    scale: float, cap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    given = (3 * torch.randn(5, 11, generator=rng)).to(dtype)
    labels = torch.tensor([3, IGNORED, 0, 10, 3])
    leaf = given.float().requires_grad_()
    bent = leaf * scale if cap is None else torch.tanh(leaf * scale / cap) * cap
    wanted = cross_entropy(bent, labels, ignore_index=IGNORED, reduction="none")
    (slope,) = torch.autograd.grad(wanted.sum(), leaf)
    logits = given.clone()
    losses = to_loss_gradient(logits, labels, IGNORED, "eager", scale, cap)
    assert losses.dtype == torch.float32 and losses[1] == 0 and not logits[1].any()
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    assert (logits.float() - slope).norm() <= tolerance * slope.norm()
    assert (given.float() - slope).norm() > slope.norm(), "the control"
