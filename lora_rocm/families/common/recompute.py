"""Activation recomputation in the backward pass, per block (arXiv 1604.06174).

It uses PyTorch's non-reentrant checkpoint. The state of the random generators is saved only if the model has dropout,
because reading that state is forbidden during graph capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.device.kept_attention import AttentionStore
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.block_inputs import BlockInputs
from lora_rocm.kernels.base_product import unpacked_once

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
        keeping_attention: blocks that keep the output of their attention, so that it is not recomputed.
        unpacks_once: whether a packed weight is unpacked once for recomputation and backward pass. The dense weights of
            a block are then in memory together.
        inputs: keeps the inputs of recomputed blocks in main memory; None if they stay on the device.

    Attributes:
        has_segments: whether several blocks were recomputed as one segment.
    """

    def __init__(
        self,
        model: LoadedModel,
        chosen: Collection[nn.Module] | None = None,
        together: bool = False,
        again: Callable[[], AbstractContextManager[object]] | None = None,
        keeping_attention: Collection[nn.Module] = (),
        unpacks_once: bool = False,
        inputs: BlockInputs | None = None,
    ) -> None:
        self._wanted = None if chosen is None else {id(block) for block in chosen}
        self._keeping = {id(block) for block in keeping_attention}
        self._together, self._again, self._unpacks_once = together and inputs is None, again, unpacks_once
        self._inputs, self.has_segments = inputs, False
        self._how: dict[str, Any] = {"use_reentrant": False}
        self._how["preserve_rng_state"] = any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
            for component in model.components.values()
            for module in component.modules()
        )

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block, and return its output."""
        if not self._wants(block):
            return block(*args, **kwargs)
        keeps_attention = id(block) in self._keeping
        inputs = self._inputs if torch.is_grad_enabled() else None
        given = None if inputs is None else inputs.taken(block, args)
        if inputs is None or given is None:
            return self._run(keeps_attention, block, *args, **kwargs)
        # The arguments are not given to the checkpoint, which would keep them; the marker shows it the device.
        return self._run(keeps_attention, lambda marker: block(*given(), **kwargs), inputs.marker)

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
                self.has_segments |= length > 1
                yield several
            else:
                yield from ([block] for block in several)
        yield from ([block] for block in blocks[first:])

    def whole(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a function, which is recomputed as a whole in the backward pass."""
        return self._run(False, run, *args, **kwargs)

    def _run(self, keeps_attention: bool, run: Run, *args: object, **kwargs: object) -> Any:
        how = dict(self._how)
        if keeps_attention or self._unpacks_once or self._again is not None:  # else compiled code runs it, too
            how["context_fn"] = partial(self._contexts, keeps_attention)
        return checkpoint(partial(run, **kwargs) if kwargs else run, *args, **how)

    def _contexts(self, keeps_attention: bool) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Return the contexts of a forward pass and of its recomputation."""
        forward: list[AbstractContextManager[object]] = []
        again = [] if self._again is None else [self._again()]
        if keeps_attention:
            store = AttentionStore()
            forward.append(store.keeping())
            again.append(store.giving())
        if self._unpacks_once:
            forward.append(unpacked_once())
            again.append(unpacked_once())
        return _nested(forward), _nested(again)

    def _wants(self, block: nn.Module) -> bool:
        return self._wanted is None or id(block) in self._wanted


@contextmanager
def _nested(contexts: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


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
