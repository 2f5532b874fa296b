"""Child process that compiles kernels into Triton's cache, for a GPU that it does not open (``kernel_processes``).

It runs the cases of the comparison with tensors in main memory. Each kernel is compiled with the arguments of its
launch, and is not launched. So Triton stores it under the key that the launch looks up later, in another process.

Its job, requests and answers are in ``processes.jobs``. The process ends when its standard input closes, even while it
compiles.

Cases have small sizes. The kernels of a step are compiled for its own sizes, so the step launches others of the same
names. ``train.step_compiler`` is the process that knows both.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Collection
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Protocol

import torch

from lora_rocm.checks.kernel_check import CANNOT, IN_EIGHT_BITS, Case, ExactCase, cases_for, launched
from lora_rocm.errors import LoraRocmError
from lora_rocm.kernels.backend import nothing_plain
from lora_rocm.processes.jobs import (
    CaseCompiled,
    CaseRequest,
    CompileAnswer,
    CompileCasesJob,
    CompileStepJob,
    CompileTarget,
    StepCompiled,
    StepRequest,
    compile_request,
    job_of,
    name_of,
    request_line,
)
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

DRIVERS = {
    "cuda": ("triton.backends.nvidia.driver", "CudaLauncher"),
    "hip": ("triton.backends.amd.driver", "HIPLauncher"),
}


def target_here() -> CompileTarget:
    """Return the target of this process's GPU."""
    from triton.runtime.driver import driver

    found = driver.active.get_current_target()
    return CompileTarget(found.backend, str(found.arch), found.warp_size)


CompileStep = Callable[[StepRequest, torch.dtype], Collection[str]]
"""Launches all kernels of a step, and returns their names (``backend.launches``)."""


class NoDevice:
    """Replaces Triton's driver. It names the GPU to compile for, and opens none."""

    def __init__(self, target: CompileTarget) -> None:
        from triton.backends.compiler import GPUTarget

        arch = int(target.arch) if target.arch.isdecimal() else target.arch
        self._target = GPUTarget(target.backend, arch, target.warp_size)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Kernel(Protocol):
    """A kernel of Triton, with its Python function."""

    fn: FunctionType


class _Share:
    """The launches that this process compiles. It begins with all of them."""

    def __init__(self) -> None:
        self.number, self.count = 0, 1

    def has(self, kernel: _Kernel, arguments: Collection[object], options: Collection[tuple[str, object]]) -> bool:
        """Whether a launch belongs to the share. Launches that need the same program belong to the same share."""
        if self.count == 1:
            return True
        values = [_kind(value) for value in arguments]
        text = repr((kernel.fn.__module__, kernel.fn.__name__, values, sorted(options, key=lambda option: option[0])))
        return zlib.crc32(text.encode()) % self.count == self.number


def _kind(value: object) -> object:
    """Return what a compiled program depends on: a tensor's dtype, and whether an integer is 1 or a multiple of 16."""
    match value:
        case torch.Tensor():
            return str(value.dtype)
        case bool():
            return value
        case int():
            return "int", value == 1, value % 16 == 0
        case _:
            return type(value).__name__


def compile_only(target: CompileTarget) -> _Share:
    """Let this process compile the kernels of its share for ``target``, and launch none from now on."""
    from triton import JITFunction
    from triton.runtime.driver import driver

    run, share = JITFunction.run, _Share()

    def compiled(kernel: _Kernel, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        if share.has(kernel, arguments, options.items()):
            _build_launcher(run(kernel, *arguments, grid=grid, warmup=True, **options), target)

    driver.set_active(NoDevice(target))
    JITFunction.run = compiled
    return share


def _build_launcher(kernel: CompiledKernel, target: CompileTarget) -> None:
    """Compile the C function that launches a kernel into the cache. Newer versions of Triton have one for all."""
    name, launcher = DRIVERS[target.backend]
    module = import_module(name)
    if hasattr(module, "make_launcher"):
        try:
            getattr(module, launcher)(kernel.src, kernel.metadata)
        except CANNOT:  # the comparison has the same error, and reports it
            traceback.print_exc()


def compile_case(case: Case | ExactCase, dtype: torch.dtype) -> None:
    """Compile the kernels of a case. An error is only printed: the comparison has the same one, and reports it."""
    from triton.errors import TritonError

    try:
        with nothing_plain(), torch.enable_grad():
            launched(case, torch.device("cpu"), dtype)
    except (TritonError, *CANNOT):
        traceback.print_exc()


def main(compile_step: CompileStep | None = None) -> int:
    """Compile the cases and the step that standard input names, until it closes."""
    try:
        job = job_of(CompileCasesJob if compile_step is None else CompileStepJob)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
    dtype, child = getattr(torch, job.dtype), name_of(job)
    torch.set_num_threads(1)
    share = compile_only(job.target)
    cases = {str(case): case for case in (*cases_for(None, dtype), *IN_EIGHT_BITS)}
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)  # the parent has ended, or does not need the rest

    threading.Thread(target=read, daemon=True, name="requests").start()
    while True:
        answer: CompileAnswer
        match compile_request(lines.get(), child):
            case StepRequest() as step:
                assert compile_step is not None, "the table has no steps for this process"
                share.number, share.count = step.share, step.shares
                answer = StepCompiled(_compiled_step(compile_step, step, dtype))
                share.number, share.count = 0, 1
            case CaseRequest(name):
                compile_case(cases[name], dtype)
                answer = CaseCompiled(name)
        sys.stdout.buffer.write(request_line(answer))
        sys.stdout.buffer.flush()


def _compiled_step(compile_step: CompileStep, step: StepRequest, dtype: torch.dtype) -> list[str]:
    """Compile a step and return its kernels' names. An error is only printed: without the kernels, the run has it too.

    Training compiles what is missing.
    """
    from triton.errors import TritonError

    try:
        with nothing_plain(), torch.enable_grad():
            return sorted(compile_step(step, dtype))
    except (LoraRocmError, TritonError, *CANNOT):
        traceback.print_exc()
        return []
