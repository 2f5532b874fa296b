"""On the meta device no initial values are drawn; real tensors get theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers.initialization as of_transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.base_models.meta_components import WithoutValues

FILLS: dict[str, Callable[[Tensor], object]] = {
    "method": lambda tensor: tensor.normal_(),
    "zero": lambda tensor: tensor.zero_(),
    "torch": nn.init.kaiming_uniform_,
    "keyword": lambda tensor: nn.init.normal_(tensor=tensor),
    "transformers": lambda tensor: of_transformers.normal_(tensor),
}


class Operations(TorchDispatchMode):
    """Counts the operations within it."""

    count = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))  # type: ignore[operator, dict-item]


@pytest.mark.parametrize("fill", FILLS)
def test_a_meta_tensor_is_left_alone_and_returned(fill: str) -> None:
    tensor = torch.empty(4, 3, device="meta")
    with torch.no_grad(), Operations() as plain:
        FILLS[fill](tensor)
    with torch.no_grad(), WithoutValues(), Operations() as left:
        found = FILLS[fill](tensor)
    assert plain.count > 0 == left.count and found is tensor


@pytest.mark.parametrize("fill", FILLS)
def test_a_real_tensor_is_filled(fill: str) -> None:
    torch.manual_seed(0)
    tensor = torch.full((4, 3), 7.0)
    with torch.no_grad(), WithoutValues():
        FILLS[fill](tensor)
    assert not (tensor == 7.0).any()


def test_modules_have_the_same_weights_but_for_their_values() -> None:
    def made() -> list[tuple[str, torch.Size, torch.dtype]]:
        with torch.device("meta"):
            module = nn.Sequential(
                nn.Linear(4, 3), nn.Conv2d(2, 3, 1), nn.LayerNorm(4), nn.Embedding(5, 4, padding_idx=0)
            )
        return [(name, weight.shape, weight.dtype) for name, weight in module.state_dict().items()]

    with WithoutValues():
        found = made()
    assert found == made() and len(found) == 7
