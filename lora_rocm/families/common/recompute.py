"""Activation recomputation in the backward pass, per block (arXiv 1604.06174).

It uses PyTorch's non-reentrant checkpoint. The state of the random generators is saved only if the model has dropout,
because reading that state is forbidden during graph capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.base import LoadedModel

Run = Callable[..., Any]
"""A function that calls its first argument, a block, with the remaining arguments."""


class Recomputing:
    """Calls blocks so that their activations are recomputed in the backward pass.

    Args:
        model: the model; if it has dropout, the generators' state is saved and restored.
        chosen: blocks to recompute, or None for all.
        together: whether neighbouring blocks may be recomputed as one segment, which keeps only its input. All weights
            of a segment have to be on the device at the same time.
        again: returns a context in which blocks are recomputed.
    """

    def __init__(
        self,
        model: LoadedModel,
        chosen: Collection[nn.Module] | None = None,
        together: bool = False,
        again: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._wanted = None if chosen is None else {id(block) for block in chosen}
        self._together = together
        self._how: dict[str, Any] = {"use_reentrant": False}
        if again is not None:
            self._how["context_fn"] = lambda: (nullcontext(), again())
        self._how["preserve_rng_state"] = any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
            for component in model.components.values()
            for module in component.modules()
        )

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block, and return its output."""
        return self.whole(block, *args, **kwargs) if self._wants(block) else block(*args, **kwargs)

    def chain(self, length: int, blocks: Sequence[nn.Module], x: Tensor, *args: Any) -> Tensor:
        """Run blocks in sequence and return the last output. They are recomputed in segments of ``length`` blocks.

        The first argument of each block is the previous block's output. The other arguments are the same for all
        blocks.
        """
        for several in self.segments(repeat(length), blocks):
            if len(several) > 1:
                x = self.whole(partial(_in_turn, several), x, *args)
            else:
                x = self(several[0], x, *args)
        return x

    def segments(self, lengths: Iterable[int], blocks: Sequence[nn.Module]) -> Iterator[Sequence[nn.Module]]:
        """Yield neighbouring blocks in segments of these lengths. Remaining blocks are yielded alone.

        Blocks are also yielded alone if ``together`` is not set, or if their segment contains a block that is not to be
        recomputed. A longer segment keeps fewer inputs, but the backward pass holds all activations of one segment. So
        the longest segments should come first: when the backward pass reaches them, few inputs are left.
        """
        first = 0
        for length in lengths:
            several = blocks[first : first + length]
            if len(several) < length:
                break
            first += length
            if self._together and all(map(self._wants, several)):
                yield several
            else:
                yield from ([block] for block in several)
        yield from ([block] for block in blocks[first:])

    def whole(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a function, which is recomputed as a whole in the backward pass."""
        return checkpoint(partial(run, **kwargs) if kwargs else run, *args, **self._how)

    def _wants(self, block: nn.Module) -> bool:
        return self._wanted is None or id(block) in self._wanted


def _in_turn(blocks: Sequence[nn.Module], x: Tensor, *args: Any) -> Tensor:
    for block in blocks:
        x = block(x, *args)
    return x


@contextmanager
def evaluating(modules: Any) -> Iterator[None]:
    """Set modules to eval mode within a context (no dropout, no recomputation).

    Afterwards, the mode of every submodule is restored.
    """
    before = [(module, module.training) for root in modules for module in root.modules()]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
