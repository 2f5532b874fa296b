"""A free update is PyTorch's own AdamW."""

from __future__ import annotations

import torch
from torch import nn

from lora_rocm.recipe.optim_sections import AdamwSection
from tests.optim.test_base import FREE, make, set_gradients


def test_updates_equal_plain_adamw_with_clipping() -> None:
    optim = AdamwSection(learning_rate=1e-2, max_grad_norm=0.5, weight_decay=0.1)
    ours = make(optim)
    reference = {name: nn.Parameter(weight.clone()) for name, weight in ours.parameters.items()}
    plain = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.1)
    for seed in range(5):
        set_gradients(ours, seed)
        gradients = ours.weights.views(ours.weights.gradients)
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), 0.5)
        plain.step()
        stats = ours.step(seed, FREE)
        torch.testing.assert_close(stats.grad_norm, norm)
    for name, parameter in ours.parameters.items():
        torch.testing.assert_close(parameter, reference[name].detach(), rtol=1e-6, atol=1e-7)
