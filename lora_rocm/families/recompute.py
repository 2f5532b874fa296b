"""Activations of a block: kept for the backward pass, or computed again there (arXiv 1604.06174).

PyTorch's checkpoint without re-entrance. It is told to leave the state of the random generators alone wherever nothing
in the model draws from them: reading that state is forbidden while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.base import LoadedModel

Run = Callable[..., Any]
"""Calls its first argument, a block, with the others."""
TOGETHER = 3
"""Neighbours that are computed again at once, where all blocks are: only the first one's input is kept. With two or
four SDXL takes more: in the backward pass there is all at once what so many keep (counted; ``docs/performance.md``)."""


class Recomputing:
    """Calls a block, or one after the other, so that what they keep is computed again in the backward pass.

    Args:
        model: looked at for dropout, whose draws have to come again.
        chosen: only these blocks; None: each.
        together: so many neighbours are computed again at once, and what is left of a row singly. The weights of all of
            them have to be on the device then.
        again: makes a context in which blocks are computed again.
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
        """Each block's first argument is the output of the one before; the others are the same for all."""
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
