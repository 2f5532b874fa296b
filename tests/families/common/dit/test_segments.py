"""Blocks that diffusers' loop calls one by one, and that are recomputed in segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.dit.family import Segments
from lora_rocm.families.common.recompute import Recomputing

WIDTH = 4


class Block(nn.Module):
    """Of one stream, or of two, which it takes and returns in another order, as FLUX.1's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1 * number, 1, WIDTH))

    def forward(self, x_BSD: Tensor, *others: Any) -> Any:
        if len(others) == 1:
            return (x_BSD * self.weight).tanh() + others[0]
        text_BSD, shift = others
        return (text_BSD * self.weight).sin(), (x_BSD * self.weight).tanh() + text_BSD.sum() * shift


def passed(blocks: list[Block], num_streams: int, run: Any) -> tuple[list[Tensor], int]:
    """(outputs and gradients, number of tensors that are kept for the backward pass)."""
    streams = tuple(torch.full((1, 2, WIDTH), 0.5 + number, requires_grad=True) for number in range(num_streams))
    given, kept = streams, 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.ndim == 3
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        for block in blocks:
            output = run(block, *streams, 0.25)
            streams = (output,) if num_streams == 1 else output[::-1]
    torch.autograd.backward([stream.sum() for stream in streams])
    weights = [block.weight for block in blocks]
    found = [leaf.grad.clone() for leaf in [*given, *weights] if leaf.grad is not None]
    for block in blocks:
        block.zero_grad()
    return [*streams, *found], kept


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("lengths", [(), (2,), (3, 2), (5,)])
def test_outputs_and_gradients_are_those_of_the_loop(lengths: tuple[int, ...], num_streams: int) -> None:
    blocks = [Block(number) for number in range(5)]
    model = LoadedModel({"net": nn.ModuleList(blocks)}, torch.float32, torch.device("cpu"))
    wanted, all_kept = passed(blocks, num_streams, lambda block, *args: block(*args))
    run = Recomputing(model, together=True)
    found, kept = passed(blocks, num_streams, Segments(run, [(blocks, lengths)], num_streams))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    num_segments = len(lengths) + 5 - sum(lengths)
    assert kept == num_segments * num_streams < all_kept


def test_a_block_that_is_not_of_the_loops_is_an_error() -> None:
    blocks = [Block(number) for number in range(3)]
    model = LoadedModel({"net": nn.ModuleList(blocks)}, torch.float32, torch.device("cpu"))
    run = Segments(Recomputing(model), [(blocks[:2], ())])
    with pytest.raises(KeyError):
        run(blocks[2], torch.ones(1, 2, WIDTH), 0.25)
