"""Muon as published for matrices, and AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.optim.muon import orthogonal
from lora_rocm.recipe.optim_sections import MuonSection
from tests.optim.published import SHAPES, assert_follows


def iterated(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):  # by the singular values
        u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
        x = u @ torch.diag(3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5) @ v
    return x.float()


class Published:
    """Algorithm 1 of arXiv 2502.16982, with PyTorch's momentum; AdamW for vectors."""

    def __init__(self, weights: list[nn.Parameter], factor_of: str) -> None:
        self.weights = [weight for weight in weights if weight.ndim == 2]
        self.momenta, self.factor_of = [torch.zeros_like(weight) for weight in self.weights], factor_of
        rest = [weight for weight in weights if weight.ndim < 2]
        self.adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1) if rest else None

    def step(self) -> None:
        for weight, momentum in zip(self.weights, self.momenta, strict=True):
            assert weight.grad is not None
            momentum.mul_(0.95).add_(0.05 * weight.grad)
            update = iterated(0.95 * momentum + 0.05 * weight.grad)
            rows, columns = weight.shape
            original = self.factor_of == "original"
            factor = max(1, rows / columns) ** 0.5 if original else 0.2 * max(rows, columns) ** 0.5
            weight.sub_(1e-2 * (factor * update + 0.1 * weight))
        if self.adamw:
            self.adamw.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_updates_are_those_of_the_papers(adjust: str) -> None:
    section = MuonSection.model_validate(
        {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0, "adjust_lr_fn": adjust}
    )
    ours = assert_follows(section, lambda weights: Published(weights, adjust))
    assert "exp_avg_sq" in ours.state()
    ours = assert_follows(section, lambda weights: Published(weights, adjust), shapes=[s for s in SHAPES if len(s) > 1])
    assert "exp_avg_sq" not in ours.state(), "matrices have one moment"


def test_the_iteration_makes_rows_or_columns_nearly_orthogonal() -> None:
    for shape in ((4, 9), (9, 4)):
        matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
        for values in torch.linalg.svdvals(orthogonal(matrices, 5)):
            assert 0.5 < float(values.min()) and float(values.max()) < 1.5
    assert torch.equal(orthogonal(torch.zeros(1, 4, 4), 5), torch.zeros(1, 4, 4))
