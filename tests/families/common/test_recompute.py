"""Recomputing blocks: the same bits, fewer tensors kept, and dropout draws the same again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing, Run

CPU = torch.device("cpu")


class Row(nn.Module):
    """Blocks one after the other, called by ``run``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 4)) for _ in range(3)
        )
        self.run: Run | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return x


def passed(net: Row, run: Run | None) -> tuple[list[Tensor], int]:
    """Gradients, and how many numbers were kept for the backward pass."""
    net.run, kept = run, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    net.zero_grad()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(torch.ones(8, 4)).square().sum()
    loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None], kept


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_the_same_to_the_bit(dropout: float) -> None:
    net = Row(dropout)
    wanted, kept = passed(net, None)
    found, kept_less = passed(net, Recomputing(LoadedModel({"net": net}, torch.float32, CPU)))
    assert same(wanted, found)
    assert kept_less < kept / 5


def test_dropout_that_is_not_drawn_again_shows() -> None:
    """Negative control of the test above: if the model claims to have no dropout, other masks come."""
    net, other = Row(0.5), Row(0.0)
    wanted, _ = passed(net, None)
    found, _ = passed(net, Recomputing(LoadedModel({"net": other}, torch.float32, CPU)))
    assert not same(wanted, found)


def test_only_the_chosen_blocks_keep_less() -> None:
    net = Row()
    model = LoadedModel({"net": net}, torch.float32, CPU)
    wanted, all_kept = passed(net, None)
    kept = [passed(net, Recomputing(model, chosen))[1] for chosen in ([], net.blocks[:1], net.blocks[:2], net.blocks)]
    assert kept[0] == all_kept
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    assert same(wanted, passed(net, Recomputing(model, net.blocks[1:2]))[0])


class Chained(Row):
    """A model with blocks that are called as a chain."""

    def __init__(self, count: int, dropout: float) -> None:
        super().__init__(dropout)
        self.blocks = nn.ModuleList([*self.blocks, *Row(dropout).blocks, *Row(dropout).blocks][:count])

    def forward(self, x: Tensor) -> Tensor:
        return self.run.chain(3, self.blocks, x) if isinstance(self.run, Recomputing) else super().forward(x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("count", "inputs"), [(2, 2), (3, 1), (8, 4)])  # 8: three, three, one, one
def test_neighbours_keep_one_input_together(count: int, inputs: int, dropout: float) -> None:
    net = Chained(count, dropout)
    model = LoadedModel({"net": net}, torch.float32, CPU)
    wanted, _ = passed(net, None)
    alone, kept = passed(net, Recomputing(model))
    found, kept_less = passed(net, Recomputing(model, together=True))
    assert same(wanted, alone) and same(wanted, found)
    x, output = 8 * 4, 8 * 4  # the output is kept by the loss
    assert (kept - output, kept_less - output) == (count * x, inputs * x)


@pytest.mark.parametrize("lengths", [(), (2,), (3, 2), (3, 3, 2), (3, 3, 3), (9,)])
def test_the_first_blocks_go_into_segments_of_these_lengths(lengths: tuple[int, ...]) -> None:
    """No block is skipped, and a segment with too few blocks is dropped."""
    run, blocks = (
        Recomputing(LoadedModel({"net": Row()}, torch.float32, CPU), together=True),
        list(Chained(8, 0).blocks),
    )
    found = list(run.segments(lengths, blocks))
    assert [block for several in found for block in several] == blocks
    whole = [length for number, length in enumerate(lengths) if sum(lengths[: number + 1]) <= 8]
    assert [len(several) for several in found] == whole + [1] * (8 - sum(whole))


def test_neighbours_of_which_one_is_not_chosen_stay_apart() -> None:
    net = Chained(3, 0.0)
    model = LoadedModel({"net": net}, torch.float32, CPU)
    chosen = [net.blocks[0], net.blocks[2]]
    assert passed(net, Recomputing(model, chosen, True))[1] == passed(net, Recomputing(model, chosen))[1]
    assert passed(net, Recomputing(model, None, True))[1] < passed(net, Recomputing(model))[1]  # the control


def test_blocks_are_computed_again_in_the_given_context() -> None:
    net, entered = Row(), []

    @contextmanager
    def again() -> Iterator[None]:
        entered.append(True)
        yield

    passed(net, Recomputing(LoadedModel({"net": net}, torch.float32, CPU), again=again))
    assert len(entered) == len(net.blocks)


def test_the_generator_is_left_alone_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state cannot be read while a graph is captured."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("read the generator's state")

    net, dropping = Row(), Row(0.5)
    monkeypatch.setattr(torch, "get_rng_state", refuse)
    passed(net, Recomputing(LoadedModel({"net": net}, torch.float32, CPU)))
    with pytest.raises(AssertionError, match="generator"):
        passed(dropping, Recomputing(LoadedModel({"net": dropping}, torch.float32, CPU)))
