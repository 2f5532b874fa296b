"""``runtime.compile``: the repeated blocks, or whole components, by ``torch.compile``; never half, never in silence.

What cannot be compiled ends the run in words (``fullgraph``): a part that ran eagerly all the same would be slow, and
nobody would know why. Each bucket's shapes are compiled by themselves (``dynamic=False``), before the first step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lora_rocm.dataset.shape import Shape
from lora_rocm.device.torch_errors import device_fault, out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import LoraRocmError, MachineError, UserError
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.families.probe_batch import send_zeros
from lora_rocm.kernels.backend import refusal
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import CompileEvent
from lora_rocm.rundir.run_context import RunContext

How = Literal["regional", "full"]
Asked = Literal["auto", "off", "regional", "full"]
USES = 3  # of each size, at most: a training pass, a held-out pass, a preview of that size
OFF = "Set runtime.compile to off: this program's own kernels then do what a compiler would do for it."


def how_asked(asked: Asked, device: torch.device, environ: Mapping[str, str] = os.environ) -> How | None:
    """What is to be compiled. ``auto`` is off: our own kernels are faster than compiled blocks (docs/performance.md).

    Raises:
        UserError: compile-unavailable: asked for where it cannot be.
    """
    if asked in ("auto", "off"):
        return None
    reason = None
    if device.type != "cuda":
        reason = "it is for GPUs, and this run trains on the processor"
    elif environ.get("TORCHDYNAMO_DISABLE", "") not in ("", "0"):
        reason = "TORCHDYNAMO_DISABLE switches the compiler off (on Windows it is set, see docs/amd.md)"
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
    """Compiles parts of a model, and counts what it compiles.

    Attributes:
        how: see ``how_asked``.
        shapes: of the buckets; their number, times the parts, bounds what is compiled.
        context: gets the events ``compile``, a beat after each piece, and a sentence where it is done.
        backend: of ``torch.compile``.
        pieces: compiled until now.
    """

    how: How
    shapes: Sequence[Shape]
    context: RunContext
    backend: str = "inductor"
    pieces: int = field(default=0, init=False)

    def put(self, family: ModelFamily, model: LoadedModel) -> None:
        """Mark the parts, once the model is as it will be trained. They are compiled when they are called."""
        from torch._dynamo import config  # takes seconds
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
        self._tell(0)

    def warm_up(self, run: Callable[[Shape], object]) -> None:
        """A pass of each shape, the largest first; its gradients are the caller's to drop.

        Raises:
            LoraRocmError: as ``explained``.
        """
        for done, shape in enumerate(self._ordered, 1):
            with self.explained():
                run(shape)
            self.context.beat("compile")
            self._tell(done)
        self.context.notice(
            f"Compiled: {self.pieces} pieces for {len(self.shapes)} sizes. They are kept for the next run."
        )

    @property
    def _ordered(self) -> list[Shape]:
        return sorted(self.shapes, key=lambda shape: -shape.cost)

    def _tell(self, done: int) -> None:
        following = next(iter(self._ordered[done:]), None)
        size = "" if following is None else str(following)
        self.context.emit(CompileEvent(size=size, done=done, total=len(self.shapes)))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of the compiler in words. Faults of the device and full memory pass as they are.

        Raises:
            LoraRocmError: compile-failed, or compile-limit where more sizes came than were planned.
        """
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            yield
        except FailOnRecompileLimitHit as error:
            what = f"More is compiled than {len(self.shapes)} shapes of samples explain ({self.pieces} pieces)."
            raise _refused("compile-limit", what, error) from error
        except TorchDynamoException as error:
            if device_fault(error) is not None or out_of_memory(error) is not None:
                raise
            raise _refused("compile-failed", "A part of the model cannot be compiled.", error) from error


def for_run(recipe: Recipe, device: torch.device, shapes: Iterable[Shape], context: RunContext) -> Compiler | None:
    """The compiler of a run over samples of these shapes; None where nothing is to be compiled."""
    how = how_asked(recipe.runtime.compile, device)
    return None if how is None else Compiler(how, tuple(shapes), context)


def zero_passes(
    family: ModelFamily, transfer: DeviceTransfer, rows: int, run: Callable[[Tensors, Tensors], object]
) -> Callable[[Shape], object]:
    """What runs a micro-batch of zeros of a shape: for ``Compiler.warm_up``."""
    return lambda shape: run(*send_zeros(family, transfer, shape, rows))


def explained(compiler: Compiler | None) -> Any:
    """``Compiler.explained``, or nothing where nothing is compiled."""
    return nullcontext() if compiler is None else compiler.explained()


def require_no_offload(compiler: Compiler | None, offloads: bool) -> None:
    """Compiled code holds on to weights, which offloading moves.

    Raises:
        UserError: compile-offload.
    """
    if compiler is not None and offloads:
        raise UserError(
            "compile-offload",
            "Frozen weights have to wait in main memory here, and compiled parts cannot follow them.",
            where=f"runtime.compile: {compiler.how}",
            fix="Set runtime.compile to off, or make the step smaller (train.batch_size, data.resolution).",
        )


def _refused(code: str, what: str, error: BaseException) -> LoraRocmError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return MachineError(code, what, where=(lines or [type(error).__name__])[0][:300], fix=OFF)
