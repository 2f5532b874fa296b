"""Rules on stacks: as many operations for many weights as for a few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.optim_sections import AdafactorSection, CameSection, MuonSection, OptimSection
from tests.optim.published import optimizer_of
from tests.optim.test_base import FREE

SHAPES = ((4, 12), (12, 4), (5,), (4, 3, 3, 3))


class Count(TorchDispatchMode):
    """Counts the operations of each name."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations(section: OptimSection, layers: int) -> int:
    optimizer = optimizer_of(section, [torch.ones(shape) for _ in range(layers) for shape in SHAPES])
    optimizer.weights.gradients.fill_(1.0)
    with Count() as count:
        optimizer.rule.step(1.0, FREE, torch.ones(()))
    return count.number


@pytest.mark.parametrize("section", [AdafactorSection(beta1=0.9), CameSection(), MuonSection()], ids=str)
def test_more_layers_of_equal_shapes_take_no_more_operations(section: OptimSection) -> None:
    assert 0 < operations(section, 20) == operations(section, 2)


def test_each_weight_has_the_rate_of_its_group_in_any_order_of_groups() -> None:
    leaves = {name: nn.Parameter(torch.zeros(4, 6)) for name in "ab"}
    groups = [{"names": ["b"], "lr": 1e-3}, {"names": ["a"], "lr": 1e-2}]
    how: dict[str, Any] = {"max_train_steps": 9, "ema_decay": 0.0, "use_loss_scale": False}
    optimizer = GatedOptimizer(FlatWeights(leaves), groups, CameSection(), **how)
    optimizer.weights.gradients.fill_(1.0)
    optimizer.step(0, FREE)
    torch.testing.assert_close(optimizer.parameters["a"], 10 * optimizer.parameters["b"])
    assert bool((optimizer.parameters["a"] < 0).all())


@pytest.mark.parametrize(
    ("shape", "is_vector"),
    [((6,), True), ((1, 6, 1, 1), True), ((1, 6), False), ((6, 1), False), ((2, 6, 1, 1), False)],
    ids=["bias", "DoRA's magnitudes of a convolution", "row", "column", "convolution"],
)
def test_a_vector_is_updated_by_adamw_and_a_matrix_is_not(shape: tuple[int, ...], is_vector: bool) -> None:
    muon = optimizer_of(MuonSection(), [torch.ones(shape)])
    assert [stack.is_vector for stack in muon.rule.stacks] == [is_vector]
    second = [tensor.shape for name, tensor in muon.state().items() if name.endswith("exp_avg_sq")]
    assert bool(second) is is_vector
