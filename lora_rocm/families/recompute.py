"""Activation recomputation in the backward pass, per block (arXiv 1604.06174).

It uses PyTorch's non-reentrant checkpoint. The state of the random generators is saved only if the model has dropout,
because reading that state is forbidden during graph capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.base import LoadedModel

Run = Callable[..., Any]
"""Calls a block, its first argument, with the other arguments."""
TOGETHER = 3
"""Number of neighbouring blocks recomputed as one segment if all blocks are; only the segment's input is kept. SDXL
takes
more memory with two or four, because the backward pass then holds all activations of a segment at once (counted;
``docs/performance.md``).
"""


class Recomputing:
    """Calls blocks so that their activations are recomputed in the backward pass.

    Args:
        model: searched for dropout, which needs the generators' state restored.
        chosen: recompute only these blocks; None: all.
        together: blocks per segment in ``chain``; leftover blocks are recomputed one by one. The weights of a whole
            segment have to be on the device at once.
        again: makes a context in which blocks are recomputed.
    """

    def __init__(
        self,
        model: LoadedModel,
        chosen: Collection[nn.Module] | None = None,
        together: int = 1,
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
        """The block's output for these arguments."""
        return self._recomputed(block, *args, **kwargs) if self._wants(block) else block(*args, **kwargs)

    def chain(self, blocks: Sequence[nn.Module], x: Tensor, *args: Any) -> Tensor:
        """Run blocks in sequence: each one's first argument is the previous output; the others are the same for all."""
        for first in range(0, len(blocks), self._together):
            several = blocks[first : first + self._together]
            if len(several) == self._together and all(map(self._wants, several)):
                x = self._recomputed(partial(_in_turn, several), x, *args)
            else:
                for block in several:
                    x = self(block, x, *args)
        return x

    def _wants(self, block: nn.Module) -> bool:
        return self._wanted is None or id(block) in self._wanted

    def _recomputed(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(run, **kwargs) if kwargs else run, *args, **self._how)


def _in_turn(blocks: Sequence[nn.Module], x: Tensor, *args: Any) -> Tensor:
    for block in blocks:
        x = block(x, *args)
    return x


@contextmanager
def evaluating(modules: Any) -> Iterator[None]:
    """Eval mode (no dropout, no recomputation); restores the mode of every submodule afterwards."""
    before = [(module, module.training) for root in modules for module in root.modules()]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
