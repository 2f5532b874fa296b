"""Recomputed tensors are not kept, and the gradients have the same bits."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lora_rocm.kernels.made_again import made, made_again


def passed(x: Tensor, again: bool, seen: list[weakref.ref[Any]]) -> Tensor:
    """A square of sines; its view is the tensor kept."""
    both = made(lambda given: given[0].sin(), [x])
    seen.append(weakref.ref(both[0].untyped_storage()))
    with made_again(both) if again else nullcontext():
        turned = both[0].t()
        return (turned @ turned.t()).sum()


def gradient(again: bool) -> tuple[Tensor, bool]:
    """The gradient, and whether the sines lived until the backward pass."""
    x, seen = torch.linspace(0, 3, 12).view(3, 4).requires_grad_(), list[weakref.ref[Any]]()
    loss = passed(x, again, seen)
    kept = seen[0]() is not None
    return torch.autograd.grad(loss, x)[0], kept


def test_what_is_made_again_is_not_kept_and_changes_no_bit() -> None:
    wanted, kept = gradient(again=False)
    found, forgotten = gradient(again=True)
    assert kept and not forgotten
    assert torch.equal(found, wanted)


def test_another_tensor_made_again_is_noticed() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    y = x.sin()
    with made_again((y, lambda: torch.zeros(2, 2))):
        loss = (y * y).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros(2, 2))


def test_an_inner_context_adds_to_the_outer_one() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    one, two = x.sin(), x.cos()
    with made_again((one, lambda: torch.zeros(2, 2))), made_again((two, lambda: torch.zeros(2, 2))):
        loss = (one * two).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros(2, 2))


@pytest.mark.parametrize("again", [False, True])
def test_in_recomputed_blocks_it_stays_out_of_the_way(again: bool) -> None:
    x, seen = torch.linspace(0, 3, 12).view(3, 4).requires_grad_(), list[weakref.ref[Any]]()
    loss = checkpoint(passed, x, again, seen, use_reentrant=False)
    assert seen[0]() is None
    assert torch.equal(torch.autograd.grad(loss, x)[0], gradient(again=False)[0])


def test_a_compiler_traces_the_whole() -> None:
    x = torch.linspace(0, 3, 12).view(3, 4).requires_grad_()

    def square(x: Tensor) -> Tensor:
        both = made(lambda given: given[0].sin(), [x])
        with made_again(both):
            return both[0] @ both[0].t()

    compiled = torch.compile(square, backend="eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.autograd.grad(square(x).sum(), x)[0])
    torch._dynamo.reset()
