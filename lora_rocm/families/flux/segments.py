"""FLUX.1's blocks recomputed in segments of neighbours.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lora_rocm.families.recompute import Recomputing

Streams = tuple[Tensor, Tensor]
LENGTH = 2
"""Blocks in a segment: three take more memory (counted)."""


class Segments:
    """Calls the blocks for diffusers' loop, which gives each the output of the one before.

    The call of a segment's first block computes the whole segment, and those of the others return what they are given.

    Args:
        run: how blocks are recomputed.
        lists: the blocks of each loop, in forward order.
    """

    def __init__(self, run: Recomputing, lists: Iterable[Sequence[nn.Module]]) -> None:
        self._run = run
        self._segments: dict[nn.Module, Sequence[nn.Module]] = {}  # of each block that is its segment's first
        for blocks in lists:
            self._segments |= dict.fromkeys(blocks, ())
            self._segments |= {several[0]: several for several in run.segments(LENGTH, blocks)}

    def __call__(self, block: nn.Module, image_BSD: Tensor, text_BSD: Tensor, *args: Any) -> Streams:
        """(text, image) after the segment that begins with the block; as they are, if none does.

        Raises:
            KeyError: the model was given other blocks since.
        """
        several = self._segments[block]
        streams: Streams = text_BSD, image_BSD
        if len(several) > 1:
            streams = self._run.whole(partial(_in_turn, several), image_BSD, text_BSD, *args)
        elif several:
            streams = self._run(block, image_BSD, text_BSD, *args)
        return streams


def _in_turn(blocks: Sequence[nn.Module], image_BSD: Tensor, text_BSD: Tensor, *args: Any) -> Streams:
    for block in blocks:
        text_BSD, image_BSD = block(image_BSD, text_BSD, *args)
    return text_BSD, image_BSD
