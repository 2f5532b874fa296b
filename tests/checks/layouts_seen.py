"""Records the memory layouts of attention's inputs and of the gradients of its outputs in a training pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lora_rocm.checks.attention_layouts import InputLayouts, Layout, layout_of
from lora_rocm.device.attention import Call


class Inputs(NamedTuple):
    """The key of a plan of the backward pass in torch's cuDNN attention: queries, keys and values."""

    layouts: InputLayouts
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]


Seen = dict[Inputs, set[Layout]]
"""Layouts of the output's gradient, by the inputs that they were seen with."""


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = defaultdict(set)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and output.requires_grad:
            call = Call(*args, **(kwargs or {}))
            given: list[Tensor] = [call.query, call.key, call.value]
            shapes, strides = tuple(tuple(t.shape) for t in given), tuple(t.stride() for t in given)
            inputs = Inputs(InputLayouts(*map(layout_of, given)), shapes, strides)
            output.register_hook(lambda gradient: self.seen[inputs].add(layout_of(gradient)))
        return output


@contextmanager
def layouts_seen() -> Iterator[Seen]:
    """Yield a dictionary that grows with each backward pass of attention that is computed within the context."""
    with _Watch() as watch:
        yield watch.seen


def by_layout(seen: Seen) -> dict[InputLayouts, set[tuple[Layout, ...]]]:
    """Return, for each layout of the inputs, the sets of gradients' layouts that one plan has to serve, sorted."""
    found: dict[InputLayouts, set[tuple[Layout, ...]]] = defaultdict(set)
    for inputs, gradients in seen.items():
        found[inputs.layouts].add(tuple(sorted(gradients)))
    return dict(found)
