"""Passes captured as graphs: one per frequent shape, all in one memory pool, each verified before it is used.

The first two passes of a shape are eager. After the second, a graph is captured with the inputs of the first pass, and
replayed with the inputs of the second. It is used from then on if the replay gives the same gradients as the eager
pass. This detects a graph with a baked-in value, or with memset nodes that do nothing (some ROCm versions). A pass
without gradients proves nothing, so the check is postponed to the next pass. If capturing fails, the shape stays eager.

Once MAX_GRAPHS shapes are captured, a shape with TIMES_AS_MANY times the passes replaces the captured shape with the
fewest. The replaced graph frees its nodes and static inputs. The memory of its activations stays in the pool, which the
other graphs use too: the pool's memory can be returned only when its last graph is gone (``releasePool`` in
c10/cuda/CUDACachingAllocator.cpp, called by ``CUDAGraph::reset`` in aten/src/ATen/cuda/CUDAGraph.cpp; on ROCm the
destructor waits for the device too).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.device.allocator import empty_pools
from lora_rocm.device.torch_errors import device_fault
from lora_rocm.families.base import Tensors
from lora_rocm.rundir.run_context import RunContext

TOLERANCE = 1e-2
"""Tolerance for the difference between a replay's gradients and an eager pass's, relative to their norm.

Atomic sums in bf16 differ by about 1e-4, results of a wrong kernel by about 1.
"""
KIND_TOLERANCE = 0.3
"""Tolerance for all A or all B matrices separately: early in a run A's gradients are too small to affect the total."""
MAX_GRAPHS = 16
"""Maximum number of captured shapes. Each costs some tens of MB for its nodes."""
TIMES_AS_MANY = 2
"""A shape replaces a captured one if it has had this many times as many passes.

So with each replacement the captured shape's number of passes at least doubles. Between two releases, n passes lead to
at most MAX_GRAPHS * log2(n) replacements.
"""
MAX_COUNTED = 256
"""Maximum number of shapes for which passes are counted. Beyond it the shape with the fewest passes is forgotten."""


class Passed(NamedTuple):
    """Results of a pass, as float32 tensors on the device."""

    loss: Tensor  # 0-d, weighted sum
    loss_B: Tensor  # [B], unweighted
    measures: Mapping[str, Tensor] = MappingProxyType({})  # 0-d, weighted sums of ``Prediction.measures``

    def copy(self) -> Passed:
        measures = {name: value.clone() for name, value in self.measures.items()}
        return Passed(self.loss.clone(), self.loss_B.clone(), measures)


Inputs = tuple[Tensors, Tensors]  # batch, draws
Pass = Callable[[Tensors, Tensors], Passed]
Capturing = Callable[[Callable[[], Passed]], tuple[Callable[[], None], Passed]]
Shape = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Capture:
    """Captures graphs on a GPU, all in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Passed]) -> tuple[Callable[[], None], Passed]:
        """Capture a pass without computing it; return its replay function and the tensors that receive its results.

        Raises:
            RuntimeError: the pass cannot be captured, or memory ran out.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            passed = run()
        return graph.replay, passed


@dataclass
class Captured:
    """One graph and its input tensors, which stay at the same addresses."""

    batch: Tensors
    draws: Tensors
    replay: Callable[[], None]
    passed: Passed

    def run(self, batch: Tensors, draws: Tensors) -> Passed:
        for static, given in ((self.batch, batch), (self.draws, draws)):
            for name, tensor in static.items():
                tensor.copy_(given[name])
        self.replay()
        return self.passed.copy()  # the next replay overwrites it


@dataclass
class Graphs:
    """The captured passes of a run.

    Attributes:
        weights: the weights for which the passes compute gradients.
        exact: whether a replay must equal the eager pass bit for bit.
        context: receives a notice if passes are not captured.
        new_capture: returns an object that captures graphs in a new memory pool.
    """

    weights: FlatWeights
    exact: bool
    context: RunContext
    new_capture: Callable[[], Capturing] = Capture
    captured: dict[Shape, Captured | None] = field(default_factory=dict, init=False)  # None: stays eager
    _passes: Counter[Shape] = field(default_factory=Counter, init=False)
    _seen: dict[Shape, Inputs] = field(default_factory=dict, init=False)  # of shapes to be captured at the next pass
    _capture: Capturing | None = field(default=None, init=False)
    _off: bool = field(default=False, init=False)
    _full: bool = field(default=False, init=False)  # the notice that MAX_GRAPHS is reached was sent

    def run(self, eager: Pass, batch: Tensors, draws: Tensors) -> Passed:
        """Run a pass: replay the graph of its shape, or run it eagerly if there is none."""
        if self._off:
            return eager(batch, draws)
        shape = tuple((name, t.shape, t.dtype) for tensors in (batch, draws) for name, t in tensors.items())
        self._count(shape)
        known = self.captured.get(shape)
        if known is not None:
            return known.run(batch, draws)
        if shape in self.captured or not self._has_place(shape):
            return eager(batch, draws)
        first = self._seen.pop(shape, None)
        if first is None:
            self._seen[shape] = batch, draws
            return eager(batch, draws)
        return self._second(shape, eager, first, (batch, draws))

    def release(self) -> None:
        """Drop all graphs and their memory pool. Shapes that could not be captured stay eager."""
        self.captured = {shape: None for shape, graph in self.captured.items() if graph is None}
        self._seen.clear()
        self._let_go()
        empty_pools()

    def _count(self, shape: Shape) -> None:
        """Count a pass of a shape; if too many shapes are counted, forget the rarest one that is not captured."""
        if shape not in self._passes and len(self._passes) >= MAX_COUNTED:
            without = (each for each in self._passes if self.captured.get(each) is None)
            rarest = min(without, key=self._passes.__getitem__)
            for known in (self._passes, self._seen, self.captured):
                known.pop(rarest, None)
        self._passes[shape] += 1

    def _has_place(self, shape: Shape) -> bool:
        """Whether a shape may be captured: MAX_GRAPHS is not reached, or it is frequent enough to replace another.

        If MAX_GRAPHS is reached, the user is notified once.
        """
        if self._has_free_place:
            return True
        self._notify_full()
        least = self._least_used()
        return least is not None and self._passes[shape] >= TIMES_AS_MANY * self._passes[least]

    @property
    def _has_free_place(self) -> bool:
        return sum(graph is not None for graph in self.captured.values()) < MAX_GRAPHS

    def _least_used(self) -> Shape | None:
        """The captured shape with the fewest passes, or None if no shape is captured."""
        captured = (shape for shape, graph in self.captured.items() if graph is not None)
        return min(captured, key=self._passes.__getitem__, default=None)

    def _second(self, shape: Shape, eager: Pass, first: Inputs, now: Inputs) -> Passed:
        """Run the second pass of a shape eagerly, then capture and verify its graph; return the eager results."""
        gradients = self.weights.gradients
        # None in the first pass of a step. The check waits for the device, but only once per captured shape.
        before_N = gradients.clone() if bool(gradients.any()) else None
        gradients.zero_()
        passed = eager(*now)
        made_N = gradients.clone()
        try:
            if all(0.0 < norm < math.inf for norm in self._norms(made_N).values()):
                self._captured_and_proven(shape, eager, first, now, passed, made_N)
            else:
                self._seen[shape] = now  # overflow, zero-weight samples, or A while B is zero: try the next
        except (RuntimeError, MemoryError) as error:
            if device_fault(error) is not None:
                raise
            self.weights.drop_leaf_gradients()
            self.captured[shape] = None
            self._let_go_if_unused()
            self.context.notice(
                f"Steps of this size run slower, because they cannot be captured as a graph: {first_line(error)}"
            )
        if before_N is None:
            gradients.copy_(made_N)
        else:
            gradients.copy_(before_N).add_(made_N)
        return passed

    def _captured_and_proven(
        self, shape: Shape, eager: Pass, first: Inputs, now: Inputs, passed: Passed, made_N: Tensor
    ) -> None:
        """Capture the graph of a shape, and keep it if its gradients agree with ``made_N``, the eager pass's.

        If MAX_GRAPHS is reached, the least used graph is dropped first. Nothing of size N is allocated, because memory
        may be short.
        """
        least = self._least_used()
        if not self._has_free_place and least is not None:
            del self.captured[least]
            self._let_go_if_unused()
        empty_pools()  # make the eager pass's memory available to the graph
        graph = self._captured(eager, first)
        self.weights.gradients.zero_()
        again = graph.run(*now)
        if self._agree(passed, again, made_N):
            self.captured[shape] = graph
            if not self._has_free_place:
                self._seen.clear()  # there may be no place for these shapes now
            return
        self._off = True
        self.release()
        self.context.notice(
            "Steps are no longer captured as graphs: a graph gave different gradients than the same step run eagerly."
        )

    def _let_go_if_unused(self) -> None:
        if not any(self.captured.values()):
            self._let_go()

    def _let_go(self) -> None:
        """Stop using the memory pool; it is freed with its last graph."""
        self._capture = None
        self.weights.keep_gradients(False)

    def _notify_full(self) -> None:
        if not self._full:
            self._full = True
            self.context.notice(
                f"Steps of {MAX_GRAPHS} sizes are captured as graphs, the maximum. Steps of other sizes run slower."
            )

    def _captured(self, eager: Pass, example: Inputs) -> Captured:
        if self._capture is None:
            self._capture = self.new_capture()
        self.weights.keep_gradients(True)
        batch, draws = ({name: tensor.clone() for name, tensor in part.items()} for part in example)
        replay, passed = self._capture(lambda: eager(batch, draws))
        return Captured(batch, draws, replay, passed)

    def _agree(self, wanted: Passed, found: Passed, wanted_N: Tensor) -> bool:
        """Whether a replay's losses, and its gradients in the buffer, equal the eager pass's within the tolerance.

        Measures are not compared: a share of samples may jump although the loss hardly differs. Unless ``exact`` is
        set, the gradient buffer is overwritten with the difference.
        """
        pairs, found_N = zip(wanted[:2], found[:2], strict=True), self.weights.gradients
        if self.exact:
            return all(torch.equal(one, other) for one, other in (*pairs, (wanted_N, found_N)))
        sizes, off = self._norms(wanted_N), self._norms(found_N.sub_(wanted_N))
        return (
            all(bool((other - one).norm() <= TOLERANCE * one.norm()) for one, other in pairs)
            and math.hypot(*off.values()) <= TOLERANCE * math.hypot(*sizes.values())
            and all(off[kind] <= KIND_TOLERANCE * sizes[kind] for kind in sizes)
        )

    def _norms(self, flat_N: Tensor) -> dict[str, float]:
        """Norms of the gradients, by the last part of the weights' names (their role in the adapter)."""
        kinds: dict[str, list[Tensor]] = {}
        for name, part in self.weights.views(flat_N).items():
            kinds.setdefault(name.rpartition(".")[2], []).append(part)
        return {kind: float(torch.stack(torch._foreach_norm(parts)).norm()) for kind, parts in kinds.items()}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its class name if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
