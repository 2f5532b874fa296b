"""Attention's output is kept over the recomputation of a block: computed once, with the same gradients bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.device import attention, kept_attention
from lora_rocm.device.attention import context_of
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing

CPU = torch.device("cpu")


class Attending(nn.Module):
    """A block with two attention calls, one of them causal."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x_BSD: Tensor) -> Tensor:
        for is_causal in (False, True):
            q, k, v = self.into(x_BSD).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)
            x_BSD = x_BSD + self.out(mixed)
        return x_BSD


class Counter(TorchDispatchMode):
    """Counts the forward passes of torch's attention operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in kept_attention.OPERATORS
        return func(*args, **(kwargs or {}))


def gradients(blocks: nn.ModuleList, run: Callable[..., Any]) -> tuple[list[Tensor], int]:
    """The gradients of all weights and of the input, and how often attention was computed."""
    x_BSD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(7)).requires_grad_()
    with Counter() as counter:
        y_BSD = x_BSD
        for block in blocks:
            y_BSD = run(block, y_BSD)
        found = torch.autograd.grad(y_BSD.square().sum(), [x_BSD, *blocks.parameters()])
    return list(found), counter.count


@pytest.fixture
def blocks() -> nn.ModuleList:
    return nn.ModuleList(Attending(seed) for seed in range(3))


def test_attention_is_computed_once_and_no_bit_changes(blocks: nn.ModuleList) -> None:
    model = LoadedModel({"net": blocks}, torch.float32, CPU)
    wanted, once = gradients(blocks, Recomputing(model, chosen=()))
    again, twice = gradients(blocks, Recomputing(model))
    kept, counted = gradients(blocks, Recomputing(model, keeping_attention=blocks))
    some, between = gradients(blocks, Recomputing(model, keeping_attention=blocks[:1]))
    assert (once, twice, counted, between) == (6, 12, 6, 10)
    for found in (again, kept, some):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_output_that_changed_while_it_was_kept_shows(blocks: nn.ModuleList, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the backward pass reads the kept tensors."""
    model = LoadedModel({"net": blocks}, torch.float32, CPU)
    wanted, _ = gradients(blocks, Recomputing(model, keeping_attention=blocks))
    give = kept_attention.AttentionStore._give

    def changed(self: kept_attention.AttentionStore, compute: Any) -> Any:
        output, *rest = give(self, compute)
        return output * 1.5, *rest

    monkeypatch.setattr(kept_attention.AttentionStore, "_give", changed)
    found, _ = gradients(blocks, Recomputing(model, keeping_attention=blocks))
    assert not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["math-groups", "math-groups-float32"])
def test_attention_in_groups_is_kept_too(blocks: nn.ModuleList, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, passes = LoadedModel({"net": blocks}, torch.float32, CPU), []
    whole = attention._probabilities

    def watched(*given: Any) -> Tensor:
        passes.append(1)
        return whole(*given)

    monkeypatch.setattr(attention, "_probabilities", watched)
    counts, found = [], []
    for keeping in ((), blocks):
        passes.clear()
        with context_of(name)():
            how = Recomputing(model, again=context_of(name), keeping_attention=keeping)
            found.append(gradients(blocks, how)[0])
        counts.append(len(passes))
    assert counts[0] - counts[1] == 6, "one forward pass less for each of six calls"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_kept_is_freed_by_the_backward_pass(blocks: nn.ModuleList, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[kept_attention.AttentionStore] = []
    begin = kept_attention.AttentionStore.__init__

    def made(self: kept_attention.AttentionStore) -> None:
        begin(self)
        stores.append(self)

    monkeypatch.setattr(kept_attention.AttentionStore, "__init__", made)
    x_BSD = torch.ones(2, 5, 16, requires_grad=True)
    run = Recomputing(LoadedModel({"net": blocks}, torch.float32, CPU), keeping_attention=blocks)
    y_BSD = x_BSD
    for block in blocks:
        y_BSD = run(block, y_BSD)
    assert [len(store._kept) for store in stores] == [2, 2, 2]
    y_BSD.sum().backward()
    assert [len(store._kept) for store in stores] == [0, 0, 0]


def test_plain_attention_keeps_nothing(blocks: nn.ModuleList) -> None:
    """It has no output without its scores; its backward pass would need those."""
    model = LoadedModel({"net": blocks}, torch.float32, CPU)
    with context_of("math")():
        wanted, _ = gradients(blocks, Recomputing(model, chosen=()))
        how = Recomputing(model, again=context_of("math"), keeping_attention=blocks)
        found, _ = gradients(blocks, how)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
