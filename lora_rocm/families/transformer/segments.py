"""Blocks recomputed in segments of neighbours.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lora_rocm.families.recompute import Recomputing

Output = Tensor | tuple[Tensor, ...]


class Segments:
    """Calls the blocks for diffusers' loop, which gives each the output of the one before.

    The call of a segment's first block computes the whole segment, and those of the others return what they are given.

    Args:
        run: how blocks are recomputed.
        loops: for each loop its blocks in forward order, and the lengths of its first segments.
        num_streams: how many of a block's arguments are the output of the block before, in reverse order (FLUX.1's
            blocks take image and text, and return text and image).
    """

    def __init__(
        self, run: Recomputing, loops: Sequence[tuple[Sequence[nn.Module], Sequence[int]]], num_streams: int = 1
    ) -> None:
        self._run, self._num_streams = run, num_streams
        self._segments: dict[nn.Module, Sequence[nn.Module]] = {}  # of each block that is its segment's first
        for blocks, lengths in loops:
            self._segments |= dict.fromkeys(blocks, ())
            self._segments |= {several[0]: several for several in run.segments(lengths, blocks)}

    def __call__(self, block: nn.Module, *args: Any) -> Output:
        """The streams [B, S, D] after the segment that begins with the block; as they are, if none does.

        Raises:
            KeyError: the model was given other blocks since.
        """
        several = self._segments[block]
        if len(several) > 1:
            output: Output = self._run.whole(partial(self._in_turn, several), *args)
        elif several:
            output = self._run(block, *args)
        else:
            output = self._as_output(args[: self._num_streams])
        return output

    def _in_turn(self, blocks: Sequence[nn.Module], *args: Any) -> Output:
        output, others = self._as_output(args[: self._num_streams]), args[self._num_streams :]
        for block in blocks:
            streams = (output,) if isinstance(output, Tensor) else output[::-1]
            output = block(*streams, *others)
        return output

    def _as_output(self, streams: tuple[Tensor, ...]) -> Output:
        return streams[0] if self._num_streams == 1 else streams[::-1]
