"""``runtime.compile``: apply ``torch.compile`` to the repeated blocks, or to whole components.

A part that cannot be compiled ends the run with an explanation (``fullgraph``): a silent fallback to eager execution
would be slow for no visible reason. Each bucket's shape is compiled separately (``dynamic=False``), before the first
step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.torch_errors import device_fault, out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import LoraRocmError, MachineError, UserError
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.families.common.probe_batch import send_zeros
from lora_rocm.kernels.backend import refusal
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import CompileEvent
from lora_rocm.rundir.run_context import RunContext

How = Literal["regional", "full"]
Asked = Literal["auto", "off", "regional", "full"]
USES = 3 * 4  # of each shape, at most: a training pass, a validation pass, a preview; each with texts of 4 lengths
OFF = "Set runtime.compile to off: lora-rocm's own kernels then replace the compiler."


def how_asked(asked: Asked, device: torch.device, environ: Mapping[str, str] = os.environ) -> How | None:
    """The parts to compile, or None if nothing is compiled. ``auto`` means off.

    The reason is that our own kernels are faster than compiled blocks (docs/lab/performance.md).

    Raises:
        UserError: "compile-unavailable", the recipe requests compilation, but it cannot be used here.
    """
    if asked in ("auto", "off"):
        return None
    reason = None
    if device.type != "cuda":
        reason = "it needs a GPU, but this run trains on the CPU"
    elif environ.get("TORCHDYNAMO_DISABLE", "") not in ("", "0"):
        reason = (
            "TORCHDYNAMO_DISABLE switches the compiler off (on Windows it is set, see docs/reference/environment.md)"
        )
    else:
        reason = refusal(device)
    if reason is not None:
        raise UserError(
            "compile-unavailable",
            f"torch.compile cannot be used: {reason}.",
            where=f"runtime.compile: {asked}",
            fix=OFF,
        )
    return "full" if asked == "full" else "regional"


@dataclass
class Compiler:
    """Compiles parts of a model and counts the compiled graphs.

    Attributes:
        how: the parts to compile, see ``how_asked``.
        shapes: the buckets' shapes. At most one graph is compiled per shape and part.
        context: receives ``compile`` events, a heartbeat after each graph, and a notice at the end.
        backend: the backend of ``torch.compile``.
        pieces: number of graphs compiled so far.
    """

    how: How
    shapes: Sequence[SampleShape]
    context: RunContext
    backend: str = "inductor"
    pieces: int = field(default=0, init=False)

    def mark(self, family: ModelFamily, model: LoadedModel) -> None:
        """Mark the parts, which are then compiled on their first call. The model must otherwise be ready to train."""
        from torch._dynamo import config  # the import takes seconds
        from torch._dynamo.backends.registry import lookup_backend

        parts = family.blocks(model) if self.how == "regional" else list(model.components.values())
        limit = USES * len(parts) * len(self.shapes)
        config.cache_size_limit = max(config.cache_size_limit, limit)
        config.accumulated_cache_size_limit = max(config.accumulated_cache_size_limit, limit)
        inner = lookup_backend(self.backend)

        def counted(graph: Any, inputs: list[Any], **options: Any) -> Any:
            compiled = inner(graph, inputs, **options)
            self.pieces += 1
            self.context.beat("compile")
            return compiled

        for part in parts:
            part.compile(backend=counted, fullgraph=True, dynamic=False)
        self._report_progress(0)

    def warm_up(self, run: Callable[[SampleShape], object]) -> None:
        """Run one pass per shape, the largest shape first. The caller has to drop the gradients.

        Raises:
            LoraRocmError: see ``explained``.
        """
        for done, shape in enumerate(self._ordered, 1):
            with self.explained():
                run(shape)
            self.context.beat("compile")
            self._report_progress(done)
        self.context.notice(
            f"Compiled {self.pieces} graphs for {len(self.shapes)} sample shapes. The next run can reuse them."
        )

    @property
    def _ordered(self) -> list[SampleShape]:
        return sorted(self.shapes, key=lambda shape: -shape.cost)

    def _report_progress(self, done: int) -> None:
        following = next(iter(self._ordered[done:]), None)
        size = "" if following is None else str(following)
        self.context.emit(CompileEvent(size=size, done=done, total=len(self.shapes)))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Within this context, compiler errors get an explanation. Device and memory errors are unchanged.

        Raises:
            LoraRocmError: "compile-failed", or "compile-limit" if more graphs were compiled than expected.
        """
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            yield
        except FailOnRecompileLimitHit as error:
            what = f"Too many graphs were compiled: {self.pieces} for only {len(self.shapes)} sample shapes."
            raise _refused("compile-limit", what, error) from error
        except TorchDynamoException as error:
            if device_fault(error) is not None or out_of_memory(error) is not None:
                raise
            raise _refused("compile-failed", "A part of the model cannot be compiled.", error) from error


def for_run(
    recipe: Recipe, device: torch.device, shapes: Iterable[SampleShape], context: RunContext
) -> Compiler | None:
    """The compiler for a run with samples of these shapes, or None if nothing is compiled."""
    how = how_asked(recipe.runtime.compile, device)
    return None if how is None else Compiler(how, tuple(shapes), context)


def zero_passes(
    family: ModelFamily, transfer: DeviceTransfer, rows: int, run: Callable[[Tensors, Tensors], object]
) -> Callable[[SampleShape], object]:
    """Return a function that runs a micro-batch of zeros with the given shape, for ``Compiler.warm_up``."""
    return lambda shape: run(*send_zeros(family, transfer, shape, rows))


def explained(compiler: Compiler | None) -> Any:
    """Return ``Compiler.explained()``, or a context that does nothing if there is no compiler."""
    return nullcontext() if compiler is None else compiler.explained()


def require_no_offload(compiler: Compiler | None, offloads: bool) -> None:
    """Refuse to compile if weights are offloaded: compiled code holds references to the weights that offloading moves.

    Raises:
        UserError: "compile-offload", both are in use.
    """
    if compiler is not None and offloads:
        raise UserError(
            "compile-offload",
            "The model cannot be compiled, because frozen weights have to be offloaded to main memory here.",
            where=f"runtime.compile: {compiler.how}",
            fix="Set runtime.compile to off, or make the step smaller (train.batch_size, data.resolution).",
        )


def _refused(code: str, what: str, error: BaseException) -> LoraRocmError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return MachineError(code, what, where=(lines or [type(error).__name__])[0][:300], fix=OFF)
