"""A free update is PyTorch's own AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_rocm.recipe.optim_sections import AdamwSection
from tests.optim.test_base import FREE, make, set_gradients


@pytest.mark.parametrize(("betas", "epsilon"), [((0.9, 0.999), 1e-8), ((0.5, 0.9), 0.1)])
def test_updates_equal_plain_adamw_with_clipping(betas: tuple[float, float], epsilon: float) -> None:
    """Gradients grow, so that some are clipped: a factor of all of them would change nothing."""
    optim = AdamwSection(learning_rate=1e-2, max_grad_norm=10.0, weight_decay=0.1, betas=betas, epsilon=epsilon)
    ours, clipped = make(optim), 0
    reference = {name: nn.Parameter(weight.clone()) for name, weight in ours.parameters.items()}
    plain = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.1, betas=betas, eps=epsilon)
    for seed in range(5):
        set_gradients(ours, seed)
        ours.weights.gradients.mul_(seed + 1)
        gradients = ours.weights.views(ours.weights.gradients)
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), 10.0)
        clipped += int(norm > 10.0)
        plain.step()
        stats = ours.step(seed, FREE)
        torch.testing.assert_close(stats.grad_norm, norm)
    assert 0 < clipped < 5
    for name, parameter in ours.parameters.items():
        torch.testing.assert_close(parameter, reference[name].detach(), rtol=1e-6, atol=1e-7)
