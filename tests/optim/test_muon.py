"""Muon as PyTorch computes it for matrices, and PyTorch's AdamW for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.optim.muon import orthogonal
from lora_rocm.recipe.optim_sections import MuonSection
from tests.optim.published import SHAPES, assert_follows, followed


class Published:
    """PyTorch's two optimizers."""

    def __init__(self, weights: list[nn.Parameter], given: dict[str, Any]) -> None:
        matrices = [weight for weight in weights if weight.ndim == 2]
        rest = [weight for weight in weights if weight.ndim < 2]
        self.parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, **given)]
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1))

    def step(self) -> None:
        for part in self.parts:
            part.step()


# PyTorch iterates in bfloat16, of 8 significant bits. Seen: up to 1.6e-3 and 3.5e-4.
@pytest.mark.parametrize(("adjust", "bound"), [("original", 3e-3), ("match_rms_adamw", 8e-4)])
@pytest.mark.parametrize("given", [{}, {"nesterov": False, "momentum": 0.8, "ns_steps": 3}], ids=str)
def test_updates_are_those_of_pytorch(given: dict[str, Any], adjust: str, bound: float) -> None:
    given = {**given, "adjust_lr_fn": adjust}
    section = MuonSection.model_validate({"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0, **given})
    changed = {"nesterov": not section.nesterov, "momentum": 0.5, "ns_steps": 4, "weight_decay": 0.5, "epsilon": 1.0}
    ours, *_ = assert_follows(section, lambda weights: Published(weights, given), changed, bound)
    assert "exp_avg_sq" in ours.state()


def test_matrices_have_one_moment() -> None:
    shapes = [shape for shape in SHAPES if len(shape) > 1]
    ours, *_ = followed(MuonSection(learning_rate=1e-2), lambda weights: Published(weights, {}), steps=1, shapes=shapes)
    assert "exp_avg_sq" not in ours.state()


def test_vectors_are_updated_by_adamw() -> None:
    assert_follows(
        MuonSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0),
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1),
        {"betas": (0.5, 0.999), "epsilon": 1e-2},
        shapes=[(7,), (9,)],
    )


def iterated(matrix: Tensor) -> Tensor:
    """The iteration on the singular values, in float64."""
    x = matrix / matrix.norm()
    for _ in range(5):
        u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
        x = u @ torch.diag(3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5) @ v
    return x.float()


def test_the_iteration_is_that_of_the_singular_values() -> None:
    """Rows or columns become nearly orthogonal. Nearer than PyTorch's bfloat16 can show."""
    for shape in ((4, 9), (9, 4)):
        matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
        found = orthogonal(matrices, 5)
        torch.testing.assert_close(found, torch.stack([iterated(matrix) for matrix in matrices]), rtol=0, atol=1e-5)
        for values in torch.linalg.svdvals(found):
            assert 0.5 < float(values.min()) and float(values.max()) < 1.5
    assert torch.equal(orthogonal(torch.zeros(1, 4, 4), 5), torch.zeros(1, 4, 4))
