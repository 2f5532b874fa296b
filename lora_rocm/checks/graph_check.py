"""Checks that a captured graph computes correctly when it is replayed with new inputs, and that its memset works.

On some ROCm versions, memset nodes of a graph do nothing or write elsewhere, or replays use old kernel arguments. The
graph then returns the result of an earlier replay, or the sum of two results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lora_rocm.checks.selftest_base import judge, whole_numbers

SIZES = (64, 16, 48)
"""Rows, inner dimension and columns of the product. Inputs are at most 2, so sums are small integers that 16-bit
formats represent exactly.
"""

Capture = Callable[[Callable[[], None]], Callable[[], None]]


def capture_on_gpu(work: Callable[[], None]) -> Callable[[], None]:
    """Capture ``work`` in a graph without running it. Return a function that replays the graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def captured_sums(device: torch.device, dtype: torch.dtype, scale: float, capture: Capture = capture_on_gpu) -> None:
    """Check the column sums of a matrix product, computed by a graph that was captured with other inputs.

    Raises:
        WrongAnswerError: a replay gave a wrong result.
        RuntimeError: the work cannot be captured.
    """
    a_MK, b_KN, wanted_N = _problem()
    x_MK, w_KN = torch.ones_like(a_MK).to(device, dtype), b_KN.to(device, dtype)
    sums_N = torch.empty(wanted_N.shape, device=device)

    def work() -> None:
        sums_N.zero_()
        sums_N.add_((x_MK @ w_KN).float().sum(0))

    work()  # create handles and kernels outside the capture
    replay = capture(work)
    for turn in (scale, -0.5 * scale):
        x_MK.copy_((a_MK * turn).to(dtype))
        replay()
        judge(sums_N, wanted_N * turn, "sums from a captured graph", 0.0)


@cache
def _problem() -> tuple[Tensor, Tensor, Tensor]:
    rows, inner, columns = SIZES
    a_MK, b_KN = whole_numbers((rows, inner), 2, seed=21), whole_numbers((inner, columns), 2, seed=22)
    return a_MK, b_KN, (a_MK @ b_KN).sum(0).float()
